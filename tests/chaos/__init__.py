"""The ledger under fire: real workers without models, killed, stopped and cut off at random (`make chaos`)."""

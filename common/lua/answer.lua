-- A generator hands in a group: append it to `raw` and finish the order's entry, or neither.
-- KEYS orders raw
-- ARGV order entry id, raw stream id, message
redis.call('XADD', KEYS[2], ARGV[2], 'm', ARGV[3])
redis.call('XACK', KEYS[1], 'generators', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
return 1

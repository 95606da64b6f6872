-- A generator that ends returns orders it did not answer: each becomes a new entry, which anyone may take at once.
-- KEYS orders
-- ARGV me, entry ids ...
-- Returns how many; those that somebody else took over meanwhile are left to them.
local returned = 0
for at = 2, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[at], ARGV[at])[1]
  local held = redis.call('XPENDING', KEYS[1], 'generators', ARGV[at], ARGV[at], 1)[1]
  if entry and held and held[2] == ARGV[1] then
    redis.call('XADD', KEYS[1], '*', unpack(entry[2]))
    redis.call('XACK', KEYS[1], 'generators', ARGV[at])
    redis.call('XDEL', KEYS[1], ARGV[at])
    returned = returned + 1
  end
end
return returned

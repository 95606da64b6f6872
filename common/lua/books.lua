-- The books of one target, read at one instant.
-- KEYS open own books
-- ARGV prefix of the target's order ids
local open = 0
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(id, 1, #ARGV[1]) == ARGV[1] then open = open + 1 end
end
local facts = redis.call('HMGET', KEYS[3], 'ordered', 'trained', 'filtered', 'expired', 'incarnation', 'round')
local out = {open, redis.call('XLEN', KEYS[2])}
for at = 1, 6 do out[#out + 1] = tonumber(facts[at] or '0') end
return out

-- An overdue order is asked again, or given up for another question.
-- KEYS open orders books
-- ARGV incarnation, old id, old deadline, new id, new deadline, new body
-- Returns 0 when the entry in `open` is no longer as the learner saw it: it was answered meanwhile and is left alone.
local seen = tonumber(redis.call('HGET', KEYS[3], 'incarnation') or '0')
if seen > tonumber(ARGV[1]) then return redis.error_reply('FENCED by incarnation ' .. seen) end
if redis.call('HGET', KEYS[1], ARGV[2]) ~= ARGV[3] then return 0 end
if ARGV[2] ~= ARGV[4] then
  redis.call('HDEL', KEYS[1], ARGV[2])
  redis.call('HINCRBY', KEYS[3], 'expired', 1)
  redis.call('HINCRBY', KEYS[3], 'ordered', 1)
end
redis.call('HSET', KEYS[1], ARGV[4], ARGV[5])
redis.call('XADD', KEYS[2], '*', 'm', ARGV[6])
return 1

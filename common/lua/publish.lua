-- A verifier publishes a scored group. The first valid answer of an open order wins; any later one is a duplicate.
-- KEYS open raw own counts authors swarm
-- ARGV order id, raw entry id, own stream id, own message,
--      swarm message or '', swarm stream id, author, quota, maximum age (ms, 0 = in rounds), time now, oldest time kept,
--      purpose
-- Returns 1 when published, 0 for a duplicate.
local first = redis.call('HDEL', KEYS[1], ARGV[1])
if first == 1 then
  redis.call('XADD', KEYS[3], ARGV[3], 'm', ARGV[4])
  redis.call('HINCRBY', KEYS[4], 'scored:' .. ARGV[12], 1)
  if ARGV[5] ~= '' then
    redis.call('XADD', KEYS[6], 'MAXLEN', ARGV[8], ARGV[6], 'm', ARGV[5])
    redis.call('XTRIM', KEYS[6], 'MINID', ARGV[11])
    if ARGV[9] ~= '0' then redis.call('PEXPIRE', KEYS[6], ARGV[9]) end
    redis.call('ZADD', KEYS[5], ARGV[10], ARGV[7])
    redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', '(' .. ARGV[11])
    redis.call('HINCRBY', KEYS[4], 'shared', 1)
  end
else
  redis.call('HINCRBY', KEYS[4], 'duplicates', 1)
end
redis.call('XACK', KEYS[2], 'verifiers', ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
return first

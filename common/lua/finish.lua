-- Finish an entry without using it: acknowledge and delete it, count why, and keep a sample when it was refused.
-- KEYS stream counts quarantine
-- ARGV group, entry id, field to count, sample or '', samples kept
-- Only whoever still holds the entry counts it, so that a count is exact whatever was redelivered.
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
if ARGV[4] ~= '' then
  redis.call('LPUSH', KEYS[3], ARGV[4])
  redis.call('LTRIM', KEYS[3], 0, tonumber(ARGV[5]) - 1)
end
return 1

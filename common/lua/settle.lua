-- A learner's state becomes the server's: at the end of a round, and (forced) whenever a learner or the server comes back.
-- Forgets what the checkpoint holds, writes the books, places orders, announces the policy.
-- KEYS open orders own books policy
-- ARGV incarnation round force | ordered trained filtered expired | policy or '' |
--      number of own entries to acknowledge, entry ids ... | number of open orders to drop, order ids ... |
--      (order id, deadline, body) ...
-- Returns 1, or 0 when this round was settled before. Error FENCED when a later incarnation has joined.
local incarnation, round, force = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local seen = tonumber(redis.call('HGET', KEYS[4], 'incarnation') or '0')
if seen > incarnation then return redis.error_reply('FENCED by incarnation ' .. seen) end
local settled = tonumber(redis.call('HGET', KEYS[4], 'round') or '-1')
if not force and seen == incarnation and settled >= round then return 0 end
redis.call('HSET', KEYS[4], 'incarnation', incarnation, 'round', round,
  'ordered', ARGV[4], 'trained', ARGV[5], 'filtered', ARGV[6], 'expired', ARGV[7])
if ARGV[8] ~= '' then redis.call('SET', KEYS[5], ARGV[8]) end
local at = 10
for _ = 1, tonumber(ARGV[9]) do
  redis.call('XACK', KEYS[3], 'learner', ARGV[at])
  redis.call('XDEL', KEYS[3], ARGV[at])
  at = at + 1
end
local drops = tonumber(ARGV[at])
at = at + 1
for _ = 1, drops do
  redis.call('HDEL', KEYS[1], ARGV[at])
  at = at + 1
end
for order = at, #ARGV, 3 do
  if redis.call('HSETNX', KEYS[1], ARGV[order], ARGV[order + 1]) == 1 then
    redis.call('XADD', KEYS[2], '*', 'm', ARGV[order + 2])
  end
end
return 1

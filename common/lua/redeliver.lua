-- Take over entries whose consumer has gone quiet, quarantine those delivered too often, retire empty consumers.
-- KEYS stream counts quarantine
-- ARGV group, me, quiet for (ms), how many, deliveries allowed, count field, samples kept, consumer retired after (ms)
-- Returns the ids now mine (read them with XREADGROUP and an explicit id).
local mine = {}
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', ARGV[4])
for _, row in ipairs(pending) do
  local id, owner, deliveries = row[1], row[2], row[4]
  if owner ~= ARGV[2] then
    if deliveries >= tonumber(ARGV[5]) then
      local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
      redis.call('XACK', KEYS[1], ARGV[1], id)
      redis.call('XDEL', KEYS[1], id)
      redis.call('HINCRBY', KEYS[2], ARGV[6], 1)
      if entry then
        redis.call('LPUSH', KEYS[3], cmsgpack.pack({reason = 'deliveries', stream = KEYS[1], head = string.sub(entry[2][2] or '', 1, 2048)}))
        redis.call('LTRIM', KEYS[3], 0, tonumber(ARGV[7]) - 1)
      end
    else
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id)
      redis.call('HINCRBY', KEYS[2], 'redelivered', 1)
      mine[#mine + 1] = id
    end
  end
end
-- Deleting a consumer forgets what is pending with it, so only empty ones go.
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local facts = {}
  for at = 1, #consumer, 2 do facts[consumer[at]] = consumer[at + 1] end
  if facts['name'] ~= ARGV[2] and facts['pending'] == 0 and facts['idle'] > tonumber(ARGV[8]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], facts['name'])
  end
end
return mine

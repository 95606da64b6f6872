-- Take over entries whose consumer has gone quiet, quarantine those delivered too often or left for too long, retire
-- empty consumers.
-- KEYS stream counts quarantine
-- ARGV group, me, quiet for (ms), how many, deliveries allowed, label of the stream, samples kept, sample's length,
--      consumer retired after (ms), oldest time (ms) of an entry left for a newer release
-- Returns the ids now mine (read them with XREADGROUP and an explicit id).
local group, me, quiet, wanted, allowed = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local function quarantine(id, reason, detail)
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  redis.call('XACK', KEYS[1], group, id)
  redis.call('XDEL', KEYS[1], id)
  redis.call('HINCRBY', KEYS[2], 'refused:' .. ARGV[6] .. ':' .. reason, 1)
  if not entry then return end
  local head = string.sub(entry[2][2] or '', 1, tonumber(ARGV[8]))
  local sample = '\133' -- a map of five
  for _, word in ipairs({'stream', ARGV[6], 'reason', reason, 'detail', detail, 'by', me, 'head'}) do
    sample = sample .. cmsgpack.pack(word)
  end
  -- cmsgpack knows text only, and what is refused here need not be any: the header of binary data by hand.
  sample = sample .. '\197' .. string.char(math.floor(#head / 256), #head % 256) .. head
  redis.call('LPUSH', KEYS[3], sample)
  redis.call('LTRIM', KEYS[3], 0, tonumber(ARGV[7]) - 1)
end

-- All that is pending, page by page: what is left alone here must not hide what lies behind it.
local lost, left, start, page = {}, {}, '-', nil
repeat
  page = redis.call('XPENDING', KEYS[1], group, start, '+', 1000)
  for _, row in ipairs(page) do
    local id, owner, idle, deliveries = row[1], row[2], row[3], row[4]
    start = '(' .. id
    if deliveries == 0 and tonumber(string.match(id, '^%d+')) < tonumber(ARGV[10]) then
      quarantine(id, 'newer_schema', 'no worker that could read it came in time')
    elseif deliveries >= allowed and (owner == me or idle >= quiet) then
      -- My own ones too: a worker that an entry kills comes back under the same name and reads it again.
      quarantine(id, 'deliveries', 'delivered ' .. deliveries .. ' times and never finished')
    elseif owner ~= me and idle >= quiet then
      -- What was left for a newer release has the count 0; it comes after what this release can do.
      local place = deliveries == 0 and left or lost
      place[#place + 1] = id
    end
  end
until #page < 1000
local mine = {}
for _, place in ipairs({lost, left}) do
  for _, id in ipairs(place) do
    if #mine >= wanted then break end
    -- JUSTID: a change of hands is no delivery.
    redis.call('XCLAIM', KEYS[1], group, me, 0, id, 'JUSTID')
    redis.call('HINCRBY', KEYS[2], 'redelivered', 1)
    mine[#mine + 1] = id
  end
end
-- Deleting a consumer forgets what is pending with it, so only empty ones go.
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], group)) do
  local facts = {}
  for at = 1, #consumer, 2 do facts[consumer[at]] = consumer[at + 1] end
  if facts['name'] ~= me and facts['pending'] == 0 and facts['idle'] > tonumber(ARGV[9]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, facts['name'])
  end
end
return mine

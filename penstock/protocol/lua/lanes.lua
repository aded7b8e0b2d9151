-- lanes: the job streams and their consumer group are there, and every queued job is in line (any part, at its start).
-- KEYS: each lane's jobs:LANE
-- ARGV: prefix, then the lanes' names in the order of KEYS
-- Returns: number of groups made; 0 where all were there
-- Atomic because a part that starts while Redis is full must be able to begin: it looks, and makes what is missing
-- behind a write that a full Redis allows.
local prefix = ARGV[1]
local first_lane = 2

freeing(prefix)
local made = 0

-- A run that was begun by a penstock without lines has queued entries that stand in none: nobody would ever lease them.
local function line_up_all(key, lane)
  local waiting = redis.call('XLEN', key) - redis.call('XPENDING', key, GROUP)[1]
  if waiting <= redis.call('ZCARD', line_key_of(prefix, lane)) then return end
  local after, page = '-', nil
  repeat
    page = redis.call('XRANGE', key, after, '+', 'COUNT', 256)
    for _, entry in ipairs(page) do
      local g = redis.call('HMGET', group_key_of(prefix, field(entry[2], 'id')), 'st', 'eid', 'nb')
      if g[1] == 'queued' and g[2] == entry[1] then line_up(prefix, lane, entry[1], g[3]) end
      after = '(' .. entry[1]
    end
  until #page < 256
end

for i, key in ipairs(KEYS) do
  local there = false
  if redis.call('EXISTS', key) == 1 then
    for _, g in ipairs(redis.call('XINFO', 'GROUPS', key)) do there = there or field(g, 'name') == GROUP end
  end
  if not there then
    redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
    made = made + 1
  end
  line_up_all(key, ARGV[first_lane + i - 1])
end
return made

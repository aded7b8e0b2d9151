-- lanes: the job streams and their consumer group are there (any part, at its start).
-- KEYS: jobs:LANE of every lane
-- ARGV: prefix
-- Returns: number of groups made; 0 where all were there
-- Atomic because a part that starts while Redis is full must be able to begin: it looks, and makes what is missing
-- behind a write that a full Redis allows.
freeing(ARGV[1])
local made = 0
for _, key in ipairs(KEYS) do
  local there = false
  if redis.call('EXISTS', key) == 1 then
    for _, g in ipairs(redis.call('XINFO', 'GROUPS', key)) do there = there or field(g, 'name') == GROUP end
  end
  if not there then
    redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
    made = made + 1
  end
end
return made

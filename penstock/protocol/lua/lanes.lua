-- lanes: make the job streams and their consumer group (any process, at its start). A run of another schema is not
-- changed, and a lane that is missing after jobs were admitted was lost: creating it again would hide that.
-- KEYS: each lane's jobs:LANE
-- ARGV: prefix
-- Returns: {schema of the run (0: none, -1: it cannot be read), schema of the caller}
-- Atomic because a process that starts while Redis is full must be able to begin: it reads, and creates what is missing
-- after a write that a full Redis allows.
local prefix = ARGV[1]

freeing(prefix)
local schema = begin(prefix)
if schema ~= SCHEMA then return {schema, SCHEMA} end
for _, key in ipairs(KEYS) do
  local there = false
  if redis.call('EXISTS', key) == 1 then
    for _, g in ipairs(redis.call('XINFO', 'GROUPS', key)) do there = there or field(g, 'name') == GROUP end
  end
  if not there and has_jobs(prefix) then error('NOGROUP the stream ' .. key .. ', or its group, was deleted') end
  if not there then redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM') end
end
return {schema, SCHEMA}

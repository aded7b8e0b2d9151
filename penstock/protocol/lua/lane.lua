-- A lane: a stream of job records with the consumer group of the workers, and the order in which its queued entries
-- are leased.
-- Keys: jobs:LANE, queued:LANE, paused, paused_by

local GROUP = 'workers'
local function lane_key_of(prefix, lane) return prefix .. 'jobs:' .. lane end
local function line_key_of(prefix, lane) return prefix .. 'queued:' .. lane end

-- Convert an entry's id to a form that sorts numerically, and back.
local function place_of(eid)
  local ms, seq = string.match(eid, '^(%d+)%-(%d+)$')
  return string.rep('0', 20 - #ms) .. ms .. '-' .. string.rep('0', 20 - #seq) .. seq
end

local function entry_of(place)
  local ms, seq = string.match(place, '^0*(%d+)%-0*(%d+)$')
  return ms .. '-' .. seq
end

-- Queued entries are ordered by the version that they need, then by age, so that a job which some engine may start
-- is never behind one which it may not: a stream alone is read from its head.
local function line_up(prefix, lane, eid, nb) redis.call('ZADD', line_key_of(prefix, lane), nb, place_of(eid)) end

-- Return whether jobs have been admitted. From then on every lane has its stream.
local function has_jobs(prefix) return redis.call('HEXISTS', prefix .. 'counters', 'admitted') == 1 end

-- Fail before a stream that was deleted is used: XADD would create it without its consumer group.
local function require_lane(prefix, lane)
  local key = lane_key_of(prefix, lane)
  if redis.call('EXISTS', key) == 0 and has_jobs(prefix) then error('NOGROUP the stream ' .. key .. ' was deleted') end
end

-- Remove a job's entry from its lane; return its body, or nil if the entry is gone.
local function take_entry(prefix, lane, eid)
  require_lane(prefix, lane)
  local key = lane_key_of(prefix, lane)
  redis.call('ZREM', line_key_of(prefix, lane), place_of(eid))
  local found = redis.call('XRANGE', key, eid, eid)
  redis.call('XACK', key, GROUP, eid)
  redis.call('XDEL', key, eid)
  if #found == 0 then return nil end
  return field(found[1][2], 'body')
end

-- lanes: make the job streams and their consumer group (any process, at its start). A run of another schema is not
-- changed, and a lane that is missing after jobs were admitted was lost: creating it again would hide that.
-- KEYS: each lane's jobs:LANE
-- ARGV: prefix
-- Returns: {schema of the run (0: none, -1: it cannot be read), schema of the caller}
-- Atomic because a process that starts while Redis is full must be able to begin: it reads, and creates what is missing
-- after a write that a full Redis allows.
local function lanes()
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
end

-- pause: nothing more is leased from a lane until it is resumed (operator). Leased jobs continue.
-- KEYS: paused, paused_by
-- ARGV: prefix, lane, record of who paused it and when ('' resumes it)
-- Returns: 1, or 0 when it was in that state already (the first record stays)
-- Atomic because the lane and the record of who paused it change together, in a full Redis too. Sleeping workers are
-- woken.
local function pause()
  local paused_key, by_key = KEYS[1], KEYS[2]
  local prefix, lane, record = ARGV[1], ARGV[2], ARGV[3]

  freeing(prefix)
  if record == '' then
    redis.call('HDEL', by_key, lane)
    if redis.call('SREM', paused_key, lane) == 0 then return 0 end
    poke(prefix .. 'wake', redis.call('ZCARD', line_key_of(prefix, lane)))
    return 1
  end
  if redis.call('SADD', paused_key, lane) == 0 then return 0 end
  redis.call('HSET', by_key, lane, record)
  return 1
end

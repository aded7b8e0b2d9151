-- The run: its schema, counters, events, wake-ups and elections, the records that its processes leave, and what every
-- other file uses: the clock, numbers in hashes and fields of stream entries.
-- Keys: schema, counters, samples (the events), wake, gate, contact, leader, epoch, ends, servers, memory:MODEL, and
--       hashes of records of processes (workers, trainers, parts, fleet, waits, ...)
--
-- All keys of a run share one hash slot (its name is a Cluster hash tag), so a verb that learns a job's id only during
-- its execution may derive the job's keys from the run's prefix.

-- Schema of a run's records. It is increased with every change that a run in progress would not survive: of
-- names of keys, fields, events or states, or of code that a record names.
local SCHEMA = 3

local WAKE_MAX = 1024 -- wake-up marks kept; a lost mark costs a poll, never a job
local EVENTS_MAX = 100000 -- events kept; they are hints, so a lost one is found by the next scan

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A lease that would end later than one taken now was renewed while the clock of the server was ahead: shorten it to
-- one lease from now.
local function cap_lease(key, lease_ms)
  if redis.call('PTTL', key) > tonumber(lease_ms) then redis.call('PEXPIRE', key, lease_ms) end
end

-- Return for how long (ms) `who` has called this at this server, with no more than `gap` ms between two calls. After an
-- outage, failover, restart or freeze, leases may have ended only because they could not be renewed. Starts again on
-- another server, and if its clock was set back; kept separately for each `gap`.
local function contact(prefix, who, gap)
  local key, now = prefix .. 'contact', now_ms()
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local at = {'server:' .. who, 'last:' .. who, 'since:' .. who}
  local c = redis.call('HMGET', key, unpack(at))
  local last, since = tonumber(c[2] or 0), tonumber(c[3] or now)
  if c[1] ~= server or now < last or now - last > gap then since = now end
  redis.call('HSET', key, at[1], server, at[2], now, at[3], since)
  return now - since
end

-- A write that frees memory: first in a script, it makes Redis allow the rest when it is full.
local function freeing(prefix) redis.call('DEL', prefix .. 'nothing') end

-- Return the number in a field, 0 if it is not set; nil if it is not a number that verbs write.
local function number_of(value)
  if not value then return 0 end
  return #value < 20 and string.match(value, '^%-?%d+$') and tonumber(value) or nil
end

-- Return the numbers in these fields of a hash, in their order; nil if one of them is invalid.
local function numbers_of(key, ...)
  local found = redis.call('HMGET', key, ...)
  for i, value in ipairs(found) do
    found[i] = number_of(value)
    if not found[i] then return nil end
  end
  return found
end

-- Return a field of a stream entry's flat field list.
local function field(flat, name)
  for i = 1, #flat, 2 do if flat[i] == name then return flat[i + 1] end end
  return nil
end

local function count(prefix, name, by) return redis.call('HINCRBY', prefix .. 'counters', name, by or 1) end

-- Wake at most `by` waiters of a list (wake: workers, gate: the producer).
local function poke(key, by)
  for _ = 1, math.min(by or 1, 64) do redis.call('LPUSH', key, '1') end
  redis.call('LTRIM', key, 0, WAKE_MAX - 1)
end

local function event(prefix, kind, job, lane)
  redis.call('XADD', prefix .. 'samples', 'MAXLEN', '~', EVENTS_MAX, '*', 'e', kind, 'j', job, 'l', lane)
end

-- Return the schema of a run's records; 0 if the run began before schemas existed, -1 if the recorded one is not a
-- number, nil if the run has not begun. A run begins when the streams of its lanes are made, or with a subscription.
local function schema_of(prefix)
  local key = prefix .. 'schema'
  local kind = redis.call('TYPE', key).ok
  local noted = kind == 'string' and redis.call('GET', key) or ''
  if kind ~= 'none' then return #noted < 10 and string.match(noted, '^[1-9]%d*$') and tonumber(noted) or -1 end
  return redis.call('EXISTS', lane_key_of(prefix, 'train'), prefix .. 'subs') > 0 and 0 or nil
end

-- For a verb that may be the first of a run: record its schema; returns the run's schema.
local function begin(prefix)
  local schema = schema_of(prefix)
  if schema then return schema end
  redis.call('SET', prefix .. 'schema', SCHEMA)
  return SCHEMA
end

local function leads(key, epoch, token)
  local l = redis.call('HMGET', key, 'epoch', 'token')
  return l[1] == epoch and l[2] == token
end

-- schema: return the schema of the run's records (before reading or writing them; read-only).
-- KEYS: schema (unused; it names the hash slot)
-- ARGV: prefix
-- Returns: {schema of the run (0: none, -1: it cannot be read), schema of the caller}; the caller's twice if the run
--          has not begun
-- Atomic because a run that begins meanwhile must not look like one without a schema.
local function schema()
  local prefix = ARGV[1]

  return {schema_of(prefix) or SCHEMA, SCHEMA}
end

-- rolled_back: Redis lost acknowledged writes (failover, power loss); keep what is known of it (any buffer).
-- KEYS: counters
-- ARGV: prefix, then per counter: name, the largest observed sum of its value and what was reported of it
-- Returns: per counter that lost more than was reported: name, how much more
-- Atomic because several processes observe the counters, and a loss reported by one must not be reported again.
local function rolled_back()
  local counters_key = KEYS[1]
  local prefix = ARGV[1]
  local first_counter = 2

  freeing(prefix)
  local lost = {}
  for i = first_counter, #ARGV, 2 do
    local name, seen = ARGV[i], tonumber(ARGV[i + 1])
    local now = numbers_of(counters_key, name, 'rolled_back:' .. name)
    local more = now and seen - now[1] - now[2] or 0
    if more > 0 then
      redis.call('HINCRBY', counters_key, 'rolled_back:' .. name, more)
      lost[#lost + 1] = name
      lost[#lost + 1] = more
    end
  end
  if #lost > 0 then count(prefix, 'rolled_back') end
  return lost
end

-- missing_keys: what Redis lost of a run, as after FLUSHALL, a deletion or an eviction (`penstock why`); reads only.
-- KEYS: schema, counters, subs, source, delayed, bodies, dead, ready, then jobs:LANE of every lane
-- ARGV: prefix, then the lanes' names in the order of KEYS
-- Returns: {admitted jobs that are in no container, jobs admitted, then names of lost keys without their prefix}
-- Atomic because jobs move meanwhile. A key of another type is skipped: its users report it.
local function missing_keys()
  local schema_key, counters_key, subs_key, source_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
  local delayed_key, bodies_key, dead_key, ready_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
  local first_lane_key = 9
  local prefix = ARGV[1]
  local first_lane = 2

  local lost = {}
  local function exists(key) return redis.call('EXISTS', key) == 1 end
  local function ask(...)
    local answer = redis.pcall(...)
    if type(answer) == 'table' and answer.err then return nil end
    return answer
  end
  local function counter(name) return number_of(ask('HGET', counters_key, name) or false) or 0 end
  local function check(is_there, name)
    if not is_there then lost[#lost + 1] = name end
  end

  -- A buffer, a worker and an admission come after the schema and the lanes of the run.
  local begun = redis.call('EXISTS', counters_key, prefix .. 'epoch', prefix .. 'leader', prefix .. 'workers') > 0
  if not begun then return {0, 0} end
  check(exists(schema_key), 'schema')

  local waiting = 0
  for i = 0, #KEYS - first_lane_key do
    local key, lane = KEYS[first_lane_key + i], ARGV[first_lane + i]
    local length, pending = ask('XLEN', key), ask('XPENDING', key, GROUP)
    local line = ask('ZCARD', line_key_of(prefix, lane))
    check(exists(key) and (pending or not length), 'jobs:' .. lane)
    if length and pending and line then check(length - pending[1] <= line, 'queued:' .. lane) end
    waiting = waiting + (length or 0)
  end
  local delayed = ask('ZCARD', delayed_key) or 0
  check(delayed <= (ask('HLEN', bodies_key) or delayed), 'bodies')
  local held = waiting + delayed + (ask('XLEN', dead_key) or 0) + (ask('ZCARD', ready_key) or 0)
  check(exists(counters_key) or held == 0, 'counters')
  local admitted = counter('admitted')
  check(exists(source_key) or admitted == 0, 'source')
  check(exists(subs_key) or counter('cut') == 0, 'subs')
  for _, name in ipairs(ask('HKEYS', subs_key) or {}) do
    local sub = string.match(name, '^sub:(.*)$')
    if sub then
      local at = ask('HMGET', prefix .. 'sub:' .. sub, 'model', 'cut', 'cursor') or {}
      check(exists(prefix .. 'sub:' .. sub), 'sub:' .. sub)
      local is_cut = (number_of(at[2]) or 0) > (number_of(at[3]) or 0)
      check(not is_cut or exists(prefix .. 'batches:' .. sub), 'batches:' .. sub)
      if at[1] and at[1] ~= '' then
        local known = ask('HGET', prefix .. 'clock', 'version:' .. at[1])
        local is_published = exists(prefix .. 'weights:' .. at[1])
        check(known or not is_published, 'clock')
        -- a publication moves the clock and is added to the stream at once
        check(is_published or not known, 'weights:' .. at[1])
      end
    end
  end
  local gone = counter('retired') + counter('evicted') + counter('dropped') + counter('cancelled')
  local result = {math.max(0, admitted - held - gone), admitted}
  for _, name in ipairs(lost) do result[#result + 1] = name end
  return result
end

-- recount: invariant I1 in one instant (audit).
-- KEYS: counters, delayed, dead, ready, then jobs:LANE of every lane
-- ARGV: none
-- Returns: {admitted, in lanes, delayed, dead, kept, retired, evicted, dropped, cancelled}
-- Atomic because jobs move meanwhile.
local function recount()
  local counters_key, delayed_key, dead_key, ready_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
  local first_lane_key = 5

  local c = redis.call('HMGET', counters_key, 'admitted', 'retired', 'evicted', 'dropped', 'cancelled')
  local lanes = 0
  for i = first_lane_key, #KEYS do lanes = lanes + redis.call('XLEN', KEYS[i]) end
  return {tonumber(c[1] or 0), lanes, redis.call('ZCARD', delayed_key), redis.call('XLEN', dead_key),
    redis.call('ZCARD', ready_key), tonumber(c[2] or 0), tonumber(c[3] or 0), tonumber(c[4] or 0), tonumber(c[5] or 0)}
end

-- lead: take or renew the leadership of the buffer.
-- KEYS: leader, epoch
-- ARGV: prefix, token, lease in ms
-- Returns: epoch, or 0 when another leads
-- Atomic because two buffers must not lead in one epoch.
local function lead()
  local leader_key, epoch_key = KEYS[1], KEYS[2]
  local prefix, token, lease_ms = ARGV[1], ARGV[2], ARGV[3]

  freeing(prefix)
  local holder = redis.call('HMGET', leader_key, 'token', 'epoch', 'lease')
  if holder[1] and holder[1] ~= token then
    if holder[3] then cap_lease(leader_key, holder[3]) end
    return 0
  end
  if holder[1] then
    redis.call('PEXPIRE', leader_key, lease_ms)
    return tonumber(holder[2])
  end
  local epoch = redis.call('INCR', epoch_key)
  redis.call('HSET', leader_key, 'epoch', epoch, 'token', token, 'lease', lease_ms)
  redis.call('PEXPIRE', leader_key, lease_ms)
  return epoch
end

-- resign: give up the leadership (a buffer that stops), or the right to record (a recorder that stops).
-- KEYS: leader or recorder
-- ARGV: epoch, token
-- Returns: 1, or 0 when it was not the caller's
-- Atomic because a successor's leadership must not be deleted.
local function resign()
  local leader_key = KEYS[1]
  local epoch, token = ARGV[1], ARGV[2]

  if not leads(leader_key, epoch, token) then return 0 end
  return redis.call('DEL', leader_key)
end

-- note: write a small record of a present or waiting process, for views ('' deletes it).
-- KEYS: hash of such records
-- ARGV: prefix, field, record
-- Returns: 1
-- A script so that it is allowed when Redis is full, which is when waits have to be reported.
local function note()
  local records_key = KEYS[1]
  local prefix, name, record = ARGV[1], ARGV[2], ARGV[3]

  freeing(prefix)
  if record == '' then redis.call('HDEL', records_key, name) else redis.call('HSET', records_key, name, record) end
  return 1
end

-- tidy: delete what dead processes left: old records, and consumers without a lease (leader).
-- KEYS: hash of presence or waits, then jobs:LANE
-- ARGV: prefix, then per record: field, record as it was read
-- Returns: records and consumers removed
-- Atomic because a record that was renewed meanwhile stays, and a consumer is deleted only without pending entries.
local function tidy()
  local records_key = KEYS[1]
  local first_lane_key = 2
  local prefix = ARGV[1]
  local first_record = 2

  freeing(prefix)
  local removed = 0
  for i = first_record, #ARGV, 2 do
    local name, record = ARGV[i], ARGV[i + 1]
    if redis.call('HGET', records_key, name) == record then
      removed = removed + redis.call('HDEL', records_key, name)
    end
  end
  for i = first_lane_key, #KEYS do
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[i], GROUP)) do
      local name = field(consumer, 'name')
      if field(consumer, 'pending') == 0 and redis.call('HEXISTS', records_key, name) == 0 then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[i], GROUP, name)
        removed = removed + 1
      end
    end
  end
  return removed
end

-- ended: record how jobs ended, per reward or environment of the user (worker; statistics, nothing moves).
-- KEYS: ends
-- ARGV: prefix, jobs that are remembered of each, then per kind: its name, a digit for each job (1: the user's
--       code failed, 2: it was refused), the last error ('': none)
-- Returns: number of kinds
-- Atomic because workers append to one line of digits.
local function ended()
  local ends_key = KEYS[1]
  local prefix, window = ARGV[1], tonumber(ARGV[2])
  local first_kind = 3

  freeing(prefix)
  for i = first_kind, #ARGV, 3 do
    local kind, new, words = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    local digits = (redis.call('HGET', ends_key, 'd:' .. kind) or '') .. new
    redis.call('HSET', ends_key, 'd:' .. kind, string.sub(digits, -window))
    if words ~= '' then redis.call('HSET', ends_key, 'w:' .. kind, words) end
  end
  return (#ARGV - first_kind + 1) / 3
end

-- server: add a payload server, or change its state (operator; any process, for those of its configuration).
-- KEYS: servers
-- ARGV: prefix, name, record, only if it is not known (0|1), random word that becomes the directory's
--       revision
-- Returns: 1, or 0 when it was known and nothing was changed
-- Atomic because workers compare only the revision.
local function server()
  local servers_key = KEYS[1]
  local prefix, name, record, only_new, revision = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

  freeing(prefix)
  local known = redis.call('HEXISTS', servers_key, 's:' .. name) == 1
  if known and only_new == '1' then return 0 end
  redis.call('HSET', servers_key, 's:' .. name, record, 'rev', revision)
  return 1
end

-- memory: request that the engines of a model offload memory (trainer or operator).
-- KEYS: memory:MODEL
-- ARGV: prefix, record of the request
-- Returns: id of the entry
-- Atomic because the newest entry is the complete request: readers need no other.
local function memory()
  local memory_key = KEYS[1]
  local prefix, wish = ARGV[1], ARGV[2]

  freeing(prefix)
  local id = redis.call('XADD', memory_key, 'MAXLEN', '~', 16, '*', 'w', wish)
  count(prefix, 'memory_wishes')
  return id
end

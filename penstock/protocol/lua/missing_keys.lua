-- missing_keys: what Redis lost of a run, as after FLUSHALL, a deletion or an eviction (`penstock why`); reads only.
-- KEYS: schema, counters, subs, source, delayed, bodies, dead, ready, then jobs:LANE of every lane
-- ARGV: prefix, then the lanes' names in the order of KEYS
-- Returns: {admitted jobs that are in no container, jobs admitted, then names of lost keys without their prefix}
-- Atomic because jobs move meanwhile. A key of another type is skipped: its users report it.
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
      check(known or not exists(prefix .. 'weights:' .. at[1]), 'clock')
    end
  end
end
local gone = counter('retired') + counter('evicted') + counter('dropped') + counter('cancelled')
local result = {math.max(0, admitted - held - gone), admitted}
for _, name in ipairs(lost) do result[#result + 1] = name end
return result

-- admit: - -> queued (producer). As many of the given jobs as every gate admits, in order.
-- KEYS: source, subs, clock, then sub:NAME of every subscription that the gate counts
-- ARGV: prefix, lane, source field, expected position, revision of subs (-1: no gate), version field of clock,
--       keep the order for cohorts (0|1), per sub:NAME the number of its gate from 1 (commas; members of a pool share
--       one), then per job: id, n, body, and when its prompt is skipped ('': never; else GROUPS,HARD,EASY: if the
--       latest GROUPS of its prompt are HARD right at most, or EASY at least, on average, in 254ths); for a line that
--       is skipped '', 0, the name of its dataset and ''
-- Returns: {'ok', admitted, position, 0, numbers from 1 of those of them that were skipped (commas)}
--          | {'moved', 0, position} | {'subs'} revision differs
--          | {'ended', 0, position} the data has ended (source train)
--          | {'closed', 0, position, number of the gate that is full, or cannot be counted; 0: no gate}
-- Atomic because the position, the gate's stock and the queue must move as one: a producer that dies or is
-- doubled at any instant neither skips a prompt nor admits it twice. Whether a prompt is skipped is judged in the
-- same instant, and stands: the position has moved past it. It takes no place at the gate.
local source_key, subs_key, clock_key = KEYS[1], KEYS[2], KEYS[3]
local first_sub_key = 4
local prefix, lane, source, expected = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local revision, clock_field, in_cohorts, gate_numbers = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local first_job = 9

local position = redis.call('HGET', source_key, source) or '0'
if position ~= expected then return {'moved', 0, position} end
local given = (#ARGV - first_job + 1) / 4
local last = source == 'train' and redis.call('HGET', source_key, 'end')
if last then
  given = math.min(given, tonumber(last) - tonumber(position))
  if given <= 0 then return {'ended', 0, position} end
end
local room, tightest = given, 0
if revision ~= '-1' then
  if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return {'subs'} end
  if #KEYS < first_sub_key then return {'closed', 0, position, 0} end
  local admitted, gone = stock_of(prefix)
  for number, members in ipairs(gates_of(KEYS, first_sub_key, gate_numbers)) do
    local free = places(subs_key, members, admitted, gone) or -math.huge
    if free < room then room, tightest = free, number end
  end
end
if room <= 0 then return {'closed', 0, position, tightest} end
begin(prefix)
require_lane(prefix, lane)
local nb = redis.call('HGET', clock_key, clock_field) or '0'
local queued, offered, taken, skipped = 0, 0, 0, {}

-- Return why the prompt of a job is skipped, 'hard' or 'easy'; nil if it is not.
local function skip_reason(job, rule)
  local groups, hard, easy = string.match(rule, '^(%d+),([^,]+),([^,]+)$')
  local rates, at = rate_place_of(prefix, job)
  if not groups or not rates then return nil end
  groups = math.min(tonumber(groups), RATE_GROUPS)
  local known, sum = redis.call('GETRANGE', rates, at, at + groups - 1), 0
  for i = 1, groups do
    local share = string.byte(known, i) or 0
    if share == 0 then return nil end -- it has fewer groups
    sum = sum + share - 1
  end
  if sum <= tonumber(hard) * groups then return 'hard' end
  return sum >= tonumber(easy) * groups and 'easy' or nil
end

local function queue(job, n, body)
  local seq = count(prefix, 'seq:' .. lane)
  local eid = redis.call('XADD', lane_key_of(prefix, lane), '*', 'id', job, 'nb', nb, 'body', body)
  line_up(prefix, lane, eid, nb)
  local key = group_key_of(prefix, job)
  redis.call('HSET', key, 'st', 'queued', 'ln', lane, 'cl', lane, 'eid', eid, 'n', n, 'c', 0, 'nb', nb, 'seq', seq)
  if in_cohorts == '1' then
    redis.call('HSET', key, 'co', 1)
    redis.call('ZADD', prefix .. 'unfinished:' .. lane, seq, job)
  end
  queued = queued + 1
end

local function is_new(job)
  local set, index = string.match(job, '^(.*)/(%d+)$')
  return redis.call('GETBIT', prefix .. 'done:' .. set, index) == 0
    and redis.call('EXISTS', group_key_of(prefix, job)) == 0
end

while taken < given and offered < room do
  local at = first_job + 4 * taken
  local job, n, body, rule = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  taken, offered = taken + 1, offered + 1
  if job == '' then
    count(prefix, 'passed_lines:' .. body)
  elseif is_new(job) then
    local why = rule ~= '' and skip_reason(job, rule)
    if why then
      count(prefix, 'skipped_' .. why .. ':' .. string.match(job, '^[^/]+'))
      skipped[#skipped + 1], offered = taken, offered - 1
    else
      queue(job, n, body)
    end
  end
end
if queued > 0 then
  count(prefix, 'admitted', queued)
  if lane == 'train' then redis.call('HINCRBY', prefix .. 'cohorts', nb, queued) end
  poke(prefix .. 'wake', queued)
end
position = redis.call('HINCRBY', source_key, source, taken)
return {'ok', taken, tostring(position), 0, table.concat(skipped, ',')}

-- Admission: the position in the prompts, the gate that limits how many groups are unfinished or unused (T3), and the
-- pass rates by which prompts are skipped.
-- Keys: source, rates:DATASET/CHUNK, done:DATASET/EPOCH; reads clock, subs and sub:NAME

local RATE_GROUPS, RATE_LINES = 8, 4096 -- latest groups of a prompt that are kept, a byte each; prompts of one string

-- Return where the latest groups of a job's prompt are recorded (records/pass_rate.py): the string and the offset in
-- it; nil if the job's id names no prompt.
local function rate_place_of(prefix, job)
  local set, index = string.match(job, '^([^/]+)/%d+/(%d+)$')
  if not set or #index > 15 then return nil end
  local chunk = math.floor(index / RATE_LINES)
  return prefix .. 'rates:' .. set .. '/' .. string.format('%.0f', chunk), (index - chunk * RATE_LINES) * RATE_GROUPS
end

-- Return the train groups admitted so far, and those of them that died or were cancelled before they were ready.
local function stock_of(prefix)
  local c = redis.call('HMGET', prefix .. 'counters', 'seq:train', 'buried:train', 'cancelled:train')
  return tonumber(c[1] or 0), tonumber(c[2] or 0) + tonumber(c[3] or 0)
end

-- Return the places at the gate (T3) of subscriptions counted together, one or a pool's members: free ones, and all;
-- nil if one of them cannot be counted.
local function places(subs_key, keys, admitted, gone)
  local stock, bound, gb, over, pool = admitted, nil, 0, 0, nil
  for _, key in ipairs(keys) do
    local counted = numbers_of(key, 'bound', 'gb', 'over', 'owed', 'p', 'disposed', 'start', 'skipped')
    if not counted then return nil end
    local h, budget, beyond, owed, consumed, disposed, start, skipped = unpack(counted)
    local sampler, share, parked = unpack(redis.call('HMGET', key, 'sampler', 'share', 'parked'))
    stock = stock - consumed
    if sampler == 'cohort' then
      -- a cohort keeps its size when a member dies: the place is free when the cohort is trained or skipped
      stock, gone = stock - skipped, 0
    elseif (share or '') ~= '' then
      stock, pool = stock - disposed, share
    else
      stock = stock - disposed - start
    end
    bound = math.min(bound or h, h)
    over = over + beyond + owed
    if parked ~= '1' then gb = gb + budget end
  end
  if pool then -- groups gone before its first member subscribed, and groups consumed by members that were dropped
    local p = numbers_of(subs_key, 'start:' .. pool, 'gone:' .. pool)
    if not p then return nil end
    stock = stock - p[1] - p[2]
  end
  local all = ((bound or 0) + 1) * gb + over
  return all - (stock - gone), all
end

-- Return the keys from `first` on, grouped by the numbers of their gates (1, 2, ... with commas), as a list of lists.
local function gates_of(keys, first, numbers)
  local gates, i = {}, first
  for number in string.gmatch(numbers, '%d+') do
    number = tonumber(number)
    gates[number] = gates[number] or {}
    table.insert(gates[number], keys[i])
    i = i + 1
  end
  return gates
end

-- identify: record the data in which positions of the source are counted (producer, at its start).
-- KEYS: source
-- ARGV: prefix, fingerprint of the prompts, then field, number of further facts about them
-- Returns: the valid fingerprint: the first one given; numbers are written only if it is the caller's
-- Atomic because two producers that start together must not both be the first.
local function identify()
  local source_key = KEYS[1]
  local prefix, fingerprint = ARGV[1], ARGV[2]
  local first_number = 3

  freeing(prefix)
  redis.call('HSETNX', source_key, 'fingerprint', fingerprint)
  local first = redis.call('HGET', source_key, 'fingerprint')
  if first == fingerprint then
    for i = first_number, #ARGV, 2 do redis.call('HSET', source_key, ARGV[i], ARGV[i + 1]) end
  end
  return first
end

-- span: record the end of the train prompts (producer; the launcher, which withdraws an older producer's record).
-- KEYS: source
-- ARGV: prefix, position at which the data ends ('': it has no end), what happens to a last batch that is short
--       (train | drop)
-- Returns: position of the train prompts; instead -1 if more was admitted already, -2 if it is not a number,
--          and nothing is changed
-- Atomic because the end must not be set before what is admitted meanwhile.
local function span()
  local source_key = KEYS[1]
  local prefix, end_position, last_batch = ARGV[1], ARGV[2], ARGV[3]

  freeing(prefix)
  local position = tonumber(redis.call('HGET', source_key, 'train') or 0)
  if not position then return -2 end
  if end_position == '' then
    redis.call('HDEL', source_key, 'end', 'last_batch')
    return position
  end
  if position > tonumber(end_position) then return -1 end
  redis.call('HSET', source_key, 'end', end_position, 'last_batch', last_batch)
  return position
end

-- swap: change a number of the source if it still is what the caller read (producer).
-- KEYS: source
-- ARGV: prefix, field, number it was read as (absent counts as 0), number it becomes
-- Returns: the number after the call
-- Atomic because two producers must continue with the same evaluation.
local function swap()
  local source_key = KEYS[1]
  local prefix, name, expected, number = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  freeing(prefix)
  local now = redis.call('HGET', source_key, name) or '0'
  if now ~= expected then return tonumber(now) end
  redis.call('HSET', source_key, name, number)
  return tonumber(number)
end

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
local function admit()
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
end

-- grant: groups beyond the gate, for a batch that cannot be filled from what the gate admits (leader).
-- KEYS: leader, subs, sub:NAME of the one that asks, delayed, counters, jobs:train, jobs:resume, jobs:suspect,
--       then sub:NAME of all that the gate counts together with it (itself, or its pool)
-- ARGV: prefix, epoch, token, groups, completed groups that they were computed from
-- Returns: groups granted now, 0 when none are granted (or the gate cannot be counted), -1: leadership lost
-- Atomic because it is granted only while the gate is closed, nothing is in flight and the ask is unfilled: repeating
-- it must not admit twice as much. The cut takes it back.
local function grant()
  local leader_key, subs_key, sub_key, delayed_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
  local counters_key, train_key, resume_key, suspect_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
  local first_member_key = 9
  local prefix, epoch, token, groups, completed = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  local s = numbers_of(sub_key, 'ask', 'cut')
  if not s or s[1] <= s[2] then return 0 end
  local flying = redis.call('ZCARD', delayed_key)
  for _, key in ipairs({train_key, resume_key, suspect_key}) do flying = flying + redis.call('XLEN', key) end
  if flying > 0 or (redis.call('HGET', counters_key, 'completed') or '0') ~= completed then return 0 end
  local members = {}
  for i = first_member_key, #KEYS do members[#members + 1] = KEYS[i] end
  local admitted, gone = stock_of(prefix)
  local free = places(subs_key, members, admitted, gone)
  if not free or free > 0 then return 0 end
  local owed = redis.call('HINCRBY', sub_key, 'owed', groups)
  poke(prefix .. 'gate')
  return owed
end

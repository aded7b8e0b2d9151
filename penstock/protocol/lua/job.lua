-- A job (a group of samples to generate): the container that it is in, from the lane to ready, dead or retiring.
-- Keys: group:JOB, delayed, bodies, dead, inflight, cohorts, unfinished:LANE

local function group_key_of(prefix, job) return prefix .. 'group:' .. job end

-- The id of a job's first entry contains its time of admission: keep it before the group refers to another entry.
local function keep_admission(key)
  local eid = redis.call('HGET', key, 'eid')
  if eid then redis.call('HSETNX', key, 'ta', string.match(eid, '^%d+')) end
end

-- Queue a job on a lane; the caller has removed it from where it was.
local function put_entry(prefix, lane, job, nb, body)
  require_lane(prefix, lane)
  local eid = redis.call('XADD', lane_key_of(prefix, lane), '*', 'id', job, 'nb', nb, 'body', body)
  line_up(prefix, lane, eid, nb)
  local key = group_key_of(prefix, job)
  settle(prefix, key, redis.call('HGET', key, 'ln'), 'redrawn')
  keep_admission(key)
  redis.call('HSET', key, 'st', 'queued', 'cl', lane, 'eid', eid)
  redis.call('HDEL', key, 'tok', 'own')
  poke(prefix .. 'wake')
  return eid
end

-- A job is no longer unfinished: remove it from the order of admission (which tells when a cohort is complete) and,
-- on lane train, from the version it was admitted under (one_step drains by this).
local function leave_cohort(prefix, job, lane, nb)
  redis.call('ZREM', prefix .. 'unfinished:' .. lane, job)
  if lane ~= 'train' then return end
  if redis.call('HINCRBY', prefix .. 'cohorts', nb, -1) <= 0 then redis.call('HDEL', prefix .. 'cohorts', nb) end
end

-- Remove a job from the running ones, unless tokens of an older version are in a prefix or in committed samples.
local function leave_inflight(prefix, job)
  local g = redis.call('HMGET', group_key_of(prefix, job), 'c', 'pf')
  if tonumber(g[1] or '0') == 0 and not g[2] then redis.call('ZREM', prefix .. 'inflight', job) end
end

-- Remove a queued, leased or delayed job from its container for good; the caller sets its next state. A worker that
-- holds it loses its lease, and the attempt ends as `how`. Returns its home lane and its record, or nil if it is in
-- none of these states.
local function withdraw(prefix, job, how)
  local key = group_key_of(prefix, job)
  local g, body = redis.call('HMGET', key, 'st', 'cl', 'eid', 'ln', 'nb'), nil
  if g[1] == 'queued' or g[1] == 'leased' then
    body = take_entry(prefix, g[2], g[3])
    if g[1] == 'leased' then
      end_try(key, how)
      unhear(prefix, key)
    end
  elseif g[1] == 'delayed' then
    body = redis.call('HGET', prefix .. 'bodies', job)
    redis.call('ZREM', prefix .. 'delayed', job)
    redis.call('HDEL', prefix .. 'bodies', job)
  else
    return nil
  end
  redis.call('HDEL', key, 'tok', 'own')
  redis.call('ZREM', prefix .. 'inflight', job)
  leave_cohort(prefix, job, g[4], g[5])
  return g[4], body
end

-- Undo `withdraw` for a job that continues, at its place and under its version.
local function enter_again(prefix, job)
  local g = redis.call('HMGET', group_key_of(prefix, job), 'ln', 'nb', 'v0', 'seq', 'co')
  if g[5] then redis.call('ZADD', prefix .. 'unfinished:' .. g[1], g[4], job) end
  if g[1] ~= 'train' then return end
  redis.call('HINCRBY', prefix .. 'cohorts', g[2], 1)
  redis.call('ZADD', prefix .. 'inflight', g[3], job)
end

-- Move a job whose entry the caller has removed to the dead letters, with all that is needed to requeue it.
local function bury(prefix, job, body, reason, detail, worker)
  local key = group_key_of(prefix, job)
  local g = redis.call('HMGET', key, 'ln', 'nb', 'att', 'cr')
  local eid = redis.call('XADD', prefix .. 'dead', '*', 'id', job, 'reason', reason, 'detail', detail,
    'worker', worker, 'attempts', g[3] or '0', 'crashes', g[4] or '0', 'body', body)
  settle(prefix, key, g[1], 'buried')
  book(prefix, g[1], 'buried', held_by(key)) -- until it is requeued
  keep_admission(key)
  redis.call('HSET', key, 'st', 'dead', 'eid', eid)
  redis.call('HDEL', key, 'tok', 'own')
  redis.call('ZREM', prefix .. 'inflight', job)
  leave_cohort(prefix, job, g[1], g[2])
  count(prefix, 'buried')
  count(prefix, 'buried_as:' .. reason)
  if g[1] == 'train' then count(prefix, 'buried:train') end
  event(prefix, 'ended', job, g[1])
  poke(prefix .. 'gate')
end

-- Set the done bit of DATASET/EPOCH/INDEX; returns its old value.
local function set_done(prefix, job)
  local set, index = string.match(job, '^(.*)/(%d+)$')
  return redis.call('SETBIT', prefix .. 'done:' .. set, index, 1)
end

-- due: delayed -> queued for jobs whose wait is over, by the server's clock (any process may call it).
-- KEYS: delayed, bodies
-- ARGV: prefix, most jobs
-- Returns: number of jobs queued
-- Atomic because two callers must not queue one job twice: the one that removes it from `delayed` queues it.
local function due()
  local delayed_key, bodies_key = KEYS[1], KEYS[2]
  local prefix, most = ARGV[1], ARGV[2]

  local now = now_ms()
  local due = redis.call('ZRANGEBYSCORE', delayed_key, '-inf', now, 'LIMIT', 0, most)
  -- a job that failed while the clock was ahead: its wait would begin later than now, and begins now
  local last = redis.call('ZREVRANGE', delayed_key, 0, most - 1, 'WITHSCORES')
  for i = 1, #last, 2 do
    local wait_ms = redis.call('HGET', group_key_of(prefix, last[i]), 'wt')
    if wait_ms and last[i + 1] - wait_ms > now then redis.call('ZADD', delayed_key, now + wait_ms, last[i]) end
  end
  for _, job in ipairs(due) do
    if redis.call('ZREM', delayed_key, job) == 1 then
      local key = group_key_of(prefix, job)
      local g = redis.call('HMGET', key, 'ln', 'nb', 'c', 'pf')
      redis.call('HDEL', key, 'wt')
      local body = redis.call('HGET', bodies_key, job)
      redis.call('HDEL', bodies_key, job)
      local begun = tonumber(g[3] or 0) > 0 or g[4]
      put_entry(prefix, begun and 'resume' or g[1], job, g[2], body)
    end
  end
  return #due
end

-- requeue: dead -> queued, with its attempts reset (operator).
-- KEYS: group:JOB, dead, clock
-- ARGV: prefix, job, version field of clock
-- Returns: 1, or 0 when the job is not dead
-- Atomic because two operators must not queue it twice.
local function requeue()
  local group_key, dead_key, clock_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, job, clock_field = ARGV[1], ARGV[2], ARGV[3]

  local g = redis.call('HMGET', group_key, 'st', 'eid', 'ln', 'c', 'co', 'pf', 'v0')
  if g[1] ~= 'dead' then return 0 end
  local found = redis.call('XRANGE', dead_key, g[2], g[2])
  if #found == 0 then return 0 end
  redis.call('XDEL', dead_key, g[2])
  book(prefix, g[3], 'buried', -held_by(group_key))
  local nb = redis.call('HGET', clock_key, clock_field) or '0'
  -- a new place in the order of admission: its old cohort was trained without it
  local seq = count(prefix, 'seq:' .. g[3])
  redis.call('HSET', group_key, 'nb', nb, 'seq', seq)
  if g[5] then redis.call('ZADD', prefix .. 'unfinished:' .. g[3], seq, job) end
  redis.call('HDEL', group_key, 'att', 'cr', 'wd', 't0')
  if g[3] == 'train' then redis.call('HINCRBY', prefix .. 'cohorts', nb, 1) end
  local begun = tonumber(g[4] or 0) > 0 or g[6]
  if begun and g[3] == 'train' then redis.call('ZADD', prefix .. 'inflight', g[7], job) end
  put_entry(prefix, begun and 'resume' or g[3], job, nb, field(found[1][2], 'body'))
  count(prefix, 'requeued')
  return 1
end

-- cancel: any live -> retiring(cancelled) (operator). A worker that holds the job sees its lease lost.
-- A group in a batch that a trainer may still read stays: no cut batch is lost (I4).
-- KEYS: group:JOB, dead, ready, subs, then sub:NAME of every live subscription
-- ARGV: prefix, job, the only state in which it is cancelled ('' for any), codes of disposals (CODE=WORD, ...), then
--       the subscriptions' names
-- Returns: the state it was in, 'cut' if it stays because of a batch, or '' if the job does not exist
-- Atomic because the job leaves exactly one container (I1).
local function cancel()
  local group_key, dead_key, ready_key, subs_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
  local first_sub_key = 5
  local prefix, job, only, codes = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local first_sub = 5

  freeing(prefix)
  local g = redis.call('HMGET', group_key, 'st', 'eid', 'ln', 'tk', 'lost')
  local st, eid, lane = unpack(g)
  if not st or st == 'retiring' or (only ~= '' and st ~= only) then return '' end
  local subs = {}
  for i = first_sub, #ARGV do subs[#subs + 1] = {key = KEYS[first_sub_key + #subs], name = ARGV[i]} end
  for _, sub in ipairs(subs) do
    local batch = tonumber(redis.call('HGET', group_key, 'b:' .. sub.name) or 0)
    -- if it cannot be read, no checkpoint is known to be past the batch
    sub.ckpt, sub.batch = number_of(redis.call('HGET', sub.key, 'ckpt')) or 0, batch
    sub.uses = tonumber(redis.call('HGET', group_key, 'u:' .. account_of(sub.key, sub.name)) or 0)
    if batch > sub.ckpt then return 'cut' end
  end
  if withdraw(prefix, job, 'cancelled') then
    if lane == 'train' then count(prefix, 'cancelled:train') end
  elseif st == 'dead' then
    redis.call('XDEL', dead_key, eid)
  elseif st == 'ready' then
    redis.call('ZREM', ready_key, job)
    local told = {}
    for _, sub in ipairs(subs) do -- free the places at the gate of subscriptions that had not used it, of a pool once
      local account = account_of(sub.key, sub.name)
      local unused = not told[account] and redis.call('HEXISTS', group_key, 'u:' .. account) == 0
      if unused and covers(redis.call('HGET', sub.key, 'lanes'), lane) then
        -- a subscription that cannot be counted keeps its gate closed until it is dropped
        if number_of(redis.call('HGET', sub.key, 'disposed')) then redis.call('HINCRBY', sub.key, 'disposed', 1) end
        told[account] = true
      end
    end
    count(prefix, 'gone:' .. lane)
  end
  local left, reasons = left_subs(subs_key), reasons_in(codes)
  local account, parts, checkpoints = fate_of(group_key, lane, g[4], g[5], subs, left, reasons, 'cancelled')
  retire(prefix, job, 'cancelled', account, parts, nil, checkpoints)
  count(prefix, 'cancelled')
  if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
  event(prefix, 'ended', job, lane)
  poke(prefix .. 'gate')
  return st
end

-- drop: leased, queued or delayed -> retiring(dropped): a group that timed out, if a policy drops it (leader). A
-- worker that holds the job loses its lease.
-- KEYS: leader, group:JOB
-- ARGV: prefix, epoch, token, job
-- Returns: 1; 0 when it is in none of these states any more; -1: leadership lost
-- Atomic because the job leaves exactly one container (I1), and its place at the gate is free in that instant.
local function drop()
  local leader_key, group_key = KEYS[1], KEYS[2]
  local prefix, epoch, token, job = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  local lane = withdraw(prefix, job, 'timed_out')
  if not lane then return 0 end
  retire(prefix, job, 'timed_out', 'dropped:timed_out')
  count(prefix, 'dropped')
  count(prefix, 'timed_out')
  count(prefix, 'timed_out:' .. lane)
  if lane == 'train' then count(prefix, 'cancelled:train') end
  if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
  event(prefix, 'ended', job, lane)
  poke(prefix .. 'gate')
  return 1
end

-- shorten: leased, queued or delayed -> ready with the committed samples, if a policy allows a short group
-- (leader). If a group reward is still to come -> queued for that. A worker that holds the job loses its
-- lease.
-- KEYS: leader, group:JOB, ready
-- ARGV: prefix, epoch, token, job, fewest samples
-- Returns: number of samples of the short group; 0 when it has too few, or all, or is not begun; -1: leadership lost
-- Atomic because a sample that is committed meanwhile is either in the group or refused.
local function shorten()
  local leader_key, group_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, epoch, token, job, fewest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  local g = redis.call('HMGET', group_key, 'c', 'n', 'rw', 'cl', 'nb')
  local have, wanted = tonumber(g[1] or 0), tonumber(g[2])
  if have < math.max(1, fewest) or have == wanted then return 0 end
  local lane, body = withdraw(prefix, job, 'shortened')
  if not lane then return 0 end
  forgo(prefix, group_key, lane, 'short_group')
  redis.call('HSET', group_key, 'n', have, 'w', wanted)
  redis.call('HDEL', group_key, 'pf')
  for k = 0, wanted - 1 do redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. k) end
  count(prefix, 'shortened')
  count(prefix, 'missing', wanted - have)
  if g[3] == '1' then
    enter_again(prefix, job)
    put_entry(prefix, g[4] == 'suspect' and 'suspect' or 'resume', job, g[5], body)
    return have
  end
  redis.call('HSET', group_key, 'st', 'ready', 't1', now_ms())
  redis.call('ZADD', ready_key, count(prefix, 'completed'), job)
  event(prefix, 'ready', job, lane)
  return have
end

-- late: list begun train groups that were first leased too long ago (leader, if a policy needs it; read-only).
-- KEYS: inflight
-- ARGV: prefix, age in ms, most groups
-- Returns: per group {job, samples committed, samples wanted, age in ms}, oldest version first
-- Atomic because ages are by the server's clock, and a group's state and count belong together.
local function late()
  local inflight_key = KEYS[1]
  local prefix, age_ms, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

  local now, found = now_ms(), {}
  for _, job in ipairs(redis.call('ZRANGE', inflight_key, 0, -1)) do
    if #found >= most then break end
    local g = redis.call('HMGET', group_key_of(prefix, job), 't0', 'c', 'n')
    local age = now - tonumber(g[1] or now)
    if age >= age_ms then found[#found + 1] = {job, tonumber(g[2] or 0), tonumber(g[3] or 0), age} end
  end
  return found
end

-- check_group: does a group's state agree with the container it should be in (audit)?
-- KEYS: group:JOB, meta:JOB, ready, delayed, dead, inflight, retiring
-- ARGV: prefix, job
-- Returns: '' when it agrees or is gone; else what is wrong
-- Atomic because jobs move during an audit.
local function check_group()
  local group_key, meta_key, ready_key, delayed_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
  local dead_key, inflight_key, retiring_key = KEYS[5], KEYS[6], KEYS[7]
  local prefix, job = ARGV[1], ARGV[2]

  local g = redis.call('HMGET', group_key, 'st', 'cl', 'eid', 'c', 'n', 'tok', 'ln', 'co', 'nb', 'rw')
  local st = g[1]
  if not st then return '' end
  local function entry(key)
    local found = redis.call('XRANGE', key, g[3], g[3])
    return #found == 1 and field(found[1][2], 'id') == job
  end
  if (st == 'queued' or st == 'leased') then
    if not entry(lane_key_of(prefix, g[2])) then return st .. ' but not in lane ' .. g[2] end
    local pending = #redis.call('XPENDING', lane_key_of(prefix, g[2]), GROUP, g[3], g[3], 1)
    local needs = redis.call('ZSCORE', line_key_of(prefix, g[2]), place_of(g[3]))
    if (needs ~= false) ~= (st == 'queued') then return st .. ', and in the line of lane ' .. g[2] .. ' or not' end
    if needs and tonumber(needs) ~= tonumber(g[9]) then return 'queued in the line of another version' end
    if st == 'queued' and pending == 1 then return 'queued but delivered' end
    if st == 'leased' and pending == 0 then return 'leased but not delivered' end
    if st == 'leased' and not g[6] then return 'leased without a token' end
  end
  local function disagrees(is_in, state) return is_in ~= (st == state) and st .. ', and in ' .. state .. ' or not' end
  local unrecorded = redis.call('ZSCORE', prefix .. 'unrecorded', job) ~= false
  local wrong = disagrees(redis.call('ZSCORE', ready_key, job) ~= false, 'ready')
    or disagrees(redis.call('ZSCORE', delayed_key, job) ~= false, 'delayed')
    or disagrees(redis.call('SISMEMBER', retiring_key, job) == 1 or unrecorded, 'retiring')
    or unrecorded and redis.call('SISMEMBER', retiring_key, job) == 1 and 'recorded, and unrecorded too'
  if wrong then return wrong end
  local live = st == 'queued' or st == 'leased' or st == 'delayed'
  if (redis.call('ZSCORE', prefix .. 'unfinished:' .. g[7], job) ~= false) ~= (live and g[8] ~= false) then
    return st .. ', and in unfinished or not'
  end
  local running = redis.call('ZSCORE', inflight_key, job)
  if running and not live then return st .. ' but in flight' end
  if st == 'leased' and g[7] == 'train' and not running then return 'leased but not in flight' end
  if st == 'dead' and not entry(dead_key) then return 'dead but without a dead letter' end
  if st == 'ready' and g[4] ~= g[5] then return 'ready with ' .. g[4] .. ' of ' .. g[5] .. ' samples' end
  if st == 'ready' and g[10] == '1' then return 'ready, and its reward is to come' end
  if live and g[4] == g[5] and g[10] ~= '1' then return st .. ' with all its samples, and no reward to come' end
  local commits = 0
  for _, name in ipairs(redis.call('HKEYS', group_key)) do
    if string.sub(name, 1, 2) == 's:' then commits = commits + 1 end
  end
  if tonumber(g[4]) ~= commits then return g[4] .. ' commits counted, ' .. commits .. ' found' end
  if commits > 0 and redis.call('EXISTS', meta_key) == 0 then return 'committed samples without metadata' end
  return ''
end

-- A lease: the right of one worker to run a job, under a random token; how its attempts end, and what they charge.
-- Keys: fields tok, own, tr, att, cr and wd of group:JOB, pending entries of jobs:LANE, reclaimer, trials:MODEL,
--       aside:MODEL

local TRIES_MAX = 16 -- attempts of a job that are recorded one by one; earlier ones are counted
local DEATHS_MAX = 3 -- workers that ended by an error under one job, from which on each charges the job

-- Return the attempts of a job (its field `tr`, records/job.py) with one more; an attempt that ends with the last
-- commit has no end here.
local function with_try(tries, lane, worker, at)
  local one = lane .. ':' .. worker .. ':' .. at
  if not tries then return one end
  local gone, kept = string.match(tries, '^%+(%d+);(.*)$')
  gone, kept = tonumber(gone or 0), kept or tries
  local _, between = string.gsub(kept, ';', ';')
  if between + 1 >= TRIES_MAX then gone, kept = gone + 1, string.match(kept, ';(.*)$') end
  return (gone > 0 and '+' .. gone .. ';' or '') .. kept .. ';' .. one
end

-- Record how the attempt of a leased job ended.
local function end_try(key, how)
  local tries = redis.call('HGET', key, 'tr')
  if tries then redis.call('HSET', key, 'tr', tries .. ':' .. now_ms() .. ':' .. how) end
end

-- Charge a job with a crash on a publication ('' for none) and queue it again: on resume, on suspect after two crashes;
-- dead if it is a suspect and the engine is `sure` to work: it finished something else since it started.
local function crashed(prefix, job, lane, body, detail, worker, sure, version)
  local key = group_key_of(prefix, job)
  local crashes = redis.call('HINCRBY', key, 'cr', 1)
  if redis.call('HGET', key, 'crv') ~= version then redis.call('HSET', key, 'crv', version, 'crn', 0) end
  redis.call('HINCRBY', key, 'crn', 1)
  count(prefix, 'crashes')
  if lane == 'suspect' and sure then
    bury(prefix, job, body, 'crashed', detail, worker)
    return 'dead'
  end
  leave_inflight(prefix, job)
  local nb = redis.call('HGET', key, 'nb')
  local target = (crashes >= 2 or lane == 'suspect') and 'suspect' or 'resume'
  put_entry(prefix, target, job, nb, body)
  return target
end

-- End a lease whose worker hands it back, and queue the job again; returns its new lane, or 'dead'. The caller has
-- removed its entry and ended its attempt. `death`: the error that ends the worker, '' if it drains. An error does not
-- say which of the worker's jobs caused it, so the first two charge no job; a job under which three workers died is
-- charged with a crash for this death and one for those before, which makes it a suspect.
local function handed_back(prefix, job, lane, body, worker, death)
  local key = group_key_of(prefix, job)
  if death ~= '' then
    local deaths = redis.call('HINCRBY', key, 'wd', 1)
    if deaths == DEATHS_MAX then redis.call('HINCRBY', key, 'cr', 1) end
    if deaths >= DEATHS_MAX then
      local detail = 'its worker died of an error ' .. deaths .. ' times while it ran; the last one: ' .. death
      return crashed(prefix, job, lane, body, detail, worker, true, '')
    end
  end
  leave_inflight(prefix, job)
  local target = lane == 'suspect' and 'suspect' or 'resume'
  put_entry(prefix, target, job, redis.call('HGET', key, 'nb'), body)
  count(prefix, 'released')
  return target
end

-- Undo the charge of a job on a publication.
local function discharge(prefix, job, version)
  local key = group_key_of(prefix, job)
  local g = redis.call('HMGET', key, 'crv', 'crn')
  if g[1] ~= version then return false end
  redis.call('HINCRBY', key, 'cr', -tonumber(g[2] or 0))
  redis.call('HDEL', key, 'crv', 'crn')
  return true
end

-- lease: queued -> leased (worker). Never blocks; sleep on the list `wake` instead.
-- KEYS: inflight, paused, then jobs:LANE in the order of search
-- ARGV: prefix, worker, token base, most jobs, engine version, suspects allowed (0|1), highest version at admission
--       that the engine may start, then the lanes' names in the order of KEYS
-- Returns: list of {lane, job, token, nb, body, attempts, crashes, {k committed}, 1: only the group's
--          reward is missing}
-- Atomic because a job must not be leased to two workers, nor start on weights older than `nb` (T12),
-- except those of a version that was set aside, within the bound. Of the jobs that may be started those of the
-- oldest version come first, then the oldest, whatever precedes them in the lane.
local function lease()
  local inflight_key, paused_key = KEYS[1], KEYS[2]
  local first_lane_key = 3
  local prefix, worker, base, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
  local version, suspects, highest = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  local first_lane = 8

  local leased, now = {}, now_ms()

  -- Lease the first job in order; false when no more of this lane may be started.
  local function lease_one(key, lane)
    local line = line_key_of(prefix, lane)
    local place = redis.call('ZRANGEBYSCORE', line, '-inf', highest, 'LIMIT', 0, 1)[1]
    if not place then return false end
    redis.call('ZREM', line, place)
    local eid = entry_of(place)
    local entry = redis.call('XRANGE', key, eid, eid)[1]
    if not entry then return true end
    local job = field(entry[2], 'id')
    local gkey = group_key_of(prefix, job)
    local g = redis.call('HMGET', gkey, 'st', 'eid', 'v0', 'c', 'pf', 'nb', 'att', 'cr', 'ln', 'n', 'tr', 'rw', 'w')
    if g[1] ~= 'queued' or g[2] ~= eid then
      redis.call('XDEL', key, eid)
      return true
    end
    -- pending from now on, wherever in the stream it is: its idle time tells when the lease runs out
    redis.call('XCLAIM', key, GROUP, worker, 0, eid, 'FORCE', 'JUSTID')
    local token = base .. '.' .. #leased
    local v0 = version
    if g[3] and (tonumber(g[4] or 0) > 0 or g[5]) then v0 = math.min(v0, tonumber(g[3])) end
    redis.call('HSET', gkey, 'st', 'leased', 'tok', token, 'own', worker, 'v0', v0,
      'tr', with_try(g[11], lane, worker, now))
    redis.call('HSETNX', gkey, 't0', now)
    if g[9] == 'train' then redis.call('ZADD', inflight_key, v0, job) end
    local committed = {}
    if tonumber(g[4] or 0) > 0 then
      for k = 0, tonumber(g[13] or g[10]) - 1 do
        if redis.call('HEXISTS', gkey, 's:' .. k) == 1 then committed[#committed + 1] = k end
      end
    end
    local rewards = g[12] == '1' and g[4] == g[10] and 1 or 0
    leased[#leased + 1] = {
      lane, job, token, g[6], field(entry[2], 'body'), g[7] or '0', g[8] or '0', committed, rewards,
    }
    return true
  end

  for i = 0, #KEYS - first_lane_key do
    local key, lane = KEYS[first_lane_key + i], ARGV[first_lane + i]
    require_lane(prefix, lane)
    local open = redis.call('SISMEMBER', paused_key, lane) == 0
    while open and #leased < most do
      local limited = lane == 'suspect'
      if limited and suspects <= 0 then break end
      local before = #leased
      if not lease_one(key, lane) then break end
      if limited then suspects = suspects - (#leased - before) end
    end
  end
  return leased
end

-- renew: leased -> leased (worker's heartbeat).
-- KEYS: counters (unused; it names the hash slot)
-- ARGV: prefix, worker, then per job: job, token
-- Returns: jobs whose lease is lost; the worker must stop them and write nothing.
-- Atomic because a bare XCLAIM from a worker that lost its lease would steal the job back.
local function renew()
  local prefix, worker = ARGV[1], ARGV[2]
  local first_lease = 3

  freeing(prefix)
  local lost = {}
  for i = first_lease, #ARGV, 2 do
    local job, token = ARGV[i], ARGV[i + 1]
    local g = redis.call('HMGET', group_key_of(prefix, job), 'st', 'tok', 'cl', 'eid')
    local mine = g[1] == 'leased' and g[2] == token
    if mine then
      mine = #redis.call('XCLAIM', lane_key_of(prefix, g[3]), GROUP, worker, 0, g[4], 'JUSTID') > 0
    end
    if not mine then lost[#lost + 1] = job end
  end
  return lost
end

-- release: leased -> queued on lane resume, without a charge (worker that drains, or restarts); charged if workers
-- died of an error under it (`handed_back`).
-- KEYS: group:JOB
-- ARGV: prefix, job, token, worker, error that ends the worker ('' if it drains), then per sample that is not
--       committed: k, report of its tokens
-- Returns: the lane where the job is queued, 'dead', or 'lost'
-- Atomic because the job must be in exactly one lane at every instant (I1).
local function release()
  local group_key = KEYS[1]
  local prefix, job, token, worker, death = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local first_told = 6

  freeing(prefix)
  local g = redis.call('HMGET', group_key, 'st', 'tok', 'cl', 'eid', 'ln')
  if g[1] ~= 'leased' or g[2] ~= token then return 'lost' end
  tell_all(prefix, group_key, g[5], ARGV, first_told)
  local body = take_entry(prefix, g[3], g[4])
  if death == '' then end_try(group_key, 'released') else end_try(group_key, 'died') end
  return handed_back(prefix, job, g[3], body, worker, death)
end

-- abandon: leased -> queued for jobs that this worker holds without knowing: the reply of a lease was lost, or the
-- job's own task ended the worker by an error, which may charge it (`handed_back`).
-- KEYS: jobs:LANE
-- ARGV: prefix, lane, worker, error that ends the worker ('' for none), then the jobs it knows
-- Returns: jobs released
-- Atomic because the pending and the known jobs must be compared in one instant.
local function abandon()
  local lane_key = KEYS[1]
  local prefix, lane, worker, death = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local first_known = 5

  freeing(prefix)
  local known = {}
  for i = first_known, #ARGV do known[ARGV[i]] = true end
  local released = {}
  for _, p in ipairs(redis.call('XPENDING', lane_key, GROUP, '-', '+', 1000, worker)) do
    local found = redis.call('XRANGE', lane_key, p[1], p[1])
    if #found == 0 then
      redis.call('XACK', lane_key, GROUP, p[1])
    else
      local job = field(found[1][2], 'id')
      local key = group_key_of(prefix, job)
      local g = redis.call('HMGET', key, 'st', 'eid', 'own')
      if not known[job] and g[1] == 'leased' and g[2] == p[1] and g[3] == worker then
        local body = take_entry(prefix, lane, p[1])
        if death == '' then end_try(key, 'unheard') else end_try(key, 'died') end
        handed_back(prefix, job, lane, body, worker, death)
        released[#released + 1] = job
      end
    end
  end
  return released
end

-- fail: leased -> delayed, or dead when its attempts are used up or it can never succeed (worker).
-- KEYS: group:JOB, delayed, bodies
-- ARGV: prefix, job, token, worker, reason, detail, attempts allowed (0: dead at once), first wait in ms,
--       longest wait in ms, then per sample that is not committed: k, report of its tokens
-- Returns: 'delayed' | 'dead' | 'lost'
-- Atomic because the attempt is counted where the job moves.
local function fail()
  local group_key, delayed_key, bodies_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, job, token = ARGV[1], ARGV[2], ARGV[3]
  local worker, reason, detail = ARGV[4], ARGV[5], ARGV[6]
  local max_attempts, retry_ms, max_retry_ms = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
  local first_told = 10

  freeing(prefix)
  local g = redis.call('HMGET', group_key, 'st', 'tok', 'cl', 'eid', 'ln')
  if g[1] ~= 'leased' or g[2] ~= token then return 'lost' end
  tell_all(prefix, group_key, g[5], ARGV, first_told)
  local body = take_entry(prefix, g[3], g[4])
  end_try(group_key, 'failed ' .. string.gsub(string.sub(reason, 1, 64), '[^%w_]', '_'))
  local attempts = redis.call('HINCRBY', group_key, 'att', 1)
  count(prefix, 'failed')
  count(prefix, 'failed:' .. reason)
  if attempts >= max_attempts then
    bury(prefix, job, body, reason, detail, worker)
    return 'dead'
  end
  leave_inflight(prefix, job)
  settle(prefix, group_key, g[5], 'redrawn')
  local wait_ms = math.floor(math.min(retry_ms * 2 ^ (attempts - 1), max_retry_ms))
  redis.call('ZADD', delayed_key, now_ms() + wait_ms, job)
  redis.call('HSET', bodies_key, job, body)
  redis.call('HSET', group_key, 'st', 'delayed', 'wt', wait_ms)
  redis.call('HDEL', group_key, 'tok', 'own')
  return 'delayed'
end

-- crash: leased -> queued on resume or suspect, or dead (worker whose engine died under the job).
-- KEYS: group:JOB, trials:MODEL, aside:MODEL
-- ARGV: prefix, job, token, worker, detail, publication that the engine had (VERSION-REV, '' for none), the engine's
--       name (one for each start), 1: it had finished something since it started, crashes that set a publication aside,
--       then per sample that is not committed: k, report of its tokens
-- Returns: 'resume' | 'suspect' | 'dead', or 'lost'
-- Atomic as release; the charge and the move are one. If several engines crashed on a publication on which none has
-- finished anything, it is to blame: it is set aside, and jobs are not charged for it, nor for their earlier crashes on
-- it.
local function crash()
  local group_key, trials_key, aside_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, job, token, worker, detail = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local publication, engine, sure, max_deaths = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])
  local first_told = 10

  freeing(prefix)
  local g = redis.call('HMGET', group_key, 'st', 'tok', 'cl', 'eid', 'nb', 'ln')
  if g[1] ~= 'leased' or g[2] ~= token then return 'lost' end
  tell_all(prefix, group_key, g[6], ARGV, first_told)
  local body = take_entry(prefix, g[3], g[4])

  local function set_aside()
    redis.call('HSET', aside_key, publication, detail)
    count(prefix, 'set_aside')
    for _, lane in ipairs({'suspect', 'resume'}) do
      for _, place in ipairs(redis.call('ZRANGE', line_key_of(prefix, lane), 0, -1)) do
        local eid = entry_of(place)
        local entry = redis.call('XRANGE', lane_key_of(prefix, lane), eid, eid)[1]
        local other = entry and field(entry[2], 'id')
        if other and discharge(prefix, other, publication) and lane == 'suspect' then
          take_entry(prefix, lane, eid)
          put_entry(prefix, 'resume', other, field(entry[2], 'nb'), field(entry[2], 'body'))
        end
      end
    end
  end

  local function is_to_blame()
    if publication == '' then return false end
    if redis.call('HEXISTS', aside_key, publication) == 1 then return true end
    if redis.call('HEXISTS', trials_key, 'ok:' .. publication) == 1 then return false end
    if redis.call('HSETNX', trials_key, 'by:' .. publication .. ':' .. engine, 1) == 0 then return false end
    if redis.call('HINCRBY', trials_key, 'dead:' .. publication, 1) < max_deaths then return false end
    set_aside()
    return true
  end

  if is_to_blame() then
    end_try(group_key, 'crashed, not charged')
    local own = discharge(prefix, job, publication)
    leave_inflight(prefix, job)
    local target = g[3] == 'suspect' and not own and 'suspect' or 'resume'
    put_entry(prefix, target, job, g[5], body)
    count(prefix, 'released')
    return target
  end
  end_try(group_key, 'crashed')
  return crashed(prefix, job, g[3], body, detail, worker, sure == '1', publication)
end

-- reclaim: end leases that were not renewed; leased -> resume, suspect or dead (`crashed`). One elected reclaimer.
-- KEYS: reclaimer, jobs:LANE
-- ARGV: prefix, lane, reclaimer's token, lease in ms, most jobs
-- Returns: list of {job, worker, where it went}, or 'contact' | 'elected' when it is not the caller's turn
-- Atomic because a lease that is renewed meanwhile must not be taken. Waits one lease after unbroken contact
-- began, or the first caller after an outage would take every lease that could not be renewed meanwhile.
local function reclaim()
  local reclaimer_key, lane_key = KEYS[1], KEYS[2]
  local prefix, lane, token, lease_ms, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

  freeing(prefix)
  local elected = redis.call('GET', reclaimer_key)
  if elected and elected ~= token then return 'elected' end
  redis.call('SET', reclaimer_key, token, 'PX', math.max(2000, lease_ms))
  if contact(prefix, 'reclaim', lease_ms / 2) <= lease_ms then return 'contact' end
  local moved = {}
  for _, p in ipairs(redis.call('XPENDING', lane_key, GROUP, 'IDLE', lease_ms, '-', '+', most)) do
    local found = redis.call('XRANGE', lane_key, p[1], p[1])
    local job = #found > 0 and field(found[1][2], 'id')
    local g = job and redis.call('HMGET', group_key_of(prefix, job), 'st', 'eid') or {}
    if g[1] == 'leased' and g[2] == p[1] then
      local body = take_entry(prefix, lane, p[1])
      end_try(group_key_of(prefix, job), 'reclaimed')
      unhear(prefix, group_key_of(prefix, job))
      local where = crashed(prefix, job, lane, body, 'the lease of worker ' .. p[2] .. ' ran out', p[2], true, '')
      count(prefix, 'reclaimed')
      moved[#moved + 1] = {job, p[2], where}
    else
      redis.call('XACK', lane_key, GROUP, p[1])
    end
  end
  return moved
end

-- Helpers for all verbs; prepended to each script when it is loaded.
-- All keys of a run share one hash slot (its name is a Cluster hash tag), so a verb that learns a job's id
-- only during its execution may derive the job's keys from the run's prefix.

-- Schema of a run's records. It is increased with every change that a run in progress would not survive: of
-- names of keys, fields, events or states, or of code that a record names.
local SCHEMA = 3
local GROUP = 'workers'
local WAKE_MAX = 1024 -- wake-up marks kept; a lost mark costs a poll, never a job
local TRIES_MAX = 16 -- attempts of a job that are recorded one by one; earlier ones are counted
local RATE_GROUPS, RATE_LINES = 8, 4096 -- latest groups of a prompt that are kept, a byte each; prompts of one string
local DEATHS_MAX = 3 -- workers that ended by an error under one job, from which on each charges the job
local EVENTS_MAX = 100000 -- events kept; they are hints, so a lost one is found by the next scan

local function group_key_of(prefix, job) return prefix .. 'group:' .. job end
local function lane_key_of(prefix, lane) return prefix .. 'jobs:' .. lane end
local function line_key_of(prefix, lane) return prefix .. 'queued:' .. lane end

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

local function count(prefix, name, by) return redis.call('HINCRBY', prefix .. 'counters', name, by or 1) end

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

-- Wake at most `by` waiters of a list (wake: workers, gate: the producer).
local function poke(key, by)
  for _ = 1, math.min(by or 1, 64) do redis.call('LPUSH', key, '1') end
  redis.call('LTRIM', key, 0, WAKE_MAX - 1)
end

-- Return a field of a stream entry's flat field list.
local function field(flat, name)
  for i = 1, #flat, 2 do if flat[i] == name then return flat[i + 1] end end
  return nil
end

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

-- The id of a job's first entry contains its time of admission: keep it before the group refers to another entry.
local function keep_admission(key)
  local eid = redis.call('HGET', key, 'eid')
  if eid then redis.call('HSETNX', key, 'ta', string.match(eid, '^%d+')) end
end

-- Return the attempts of a job (its field `tr`, records/tries.py) with one more; an attempt that ends with the last
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

local function event(prefix, kind, job, lane)
  redis.call('XADD', prefix .. 'samples', 'MAXLEN', '~', EVENTS_MAX, '*', 'e', kind, 'j', job, 'l', lane)
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

-- Complete a group: its lease ends, and subscriptions may use it. The caller has checked that it is leased, in this
-- lane and entry.
local function complete(prefix, job, lane, eid)
  local key = group_key_of(prefix, job)
  local g = redis.call('HMGET', key, 'ln', 'nb')
  redis.call('HSET', key, 'st', 'ready', 't1', now_ms())
  redis.call('HDEL', key, 'tok', 'own', 'pf', 'told')
  redis.call('XACK', lane_key_of(prefix, lane), GROUP, eid)
  redis.call('XDEL', lane_key_of(prefix, lane), eid)
  redis.call('ZREM', prefix .. 'inflight', job)
  redis.call('ZADD', prefix .. 'ready', count(prefix, 'completed'), job)
  leave_cohort(prefix, job, g[1], g[2])
  event(prefix, 'ready', job, g[1])
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

-- Set the done bit of DATASET/EPOCH/INDEX; returns its old value.
local function set_done(prefix, job)
  local set, index = string.match(job, '^(.*)/(%d+)$')
  return redis.call('SETBIT', prefix .. 'done:' .. set, index, 1)
end

-- Return where the latest groups of a job's prompt are recorded (records/pass_rate.py): the string and the offset in
-- it;
-- nil if the job's id names no prompt.
local function rate_place_of(prefix, job)
  local set, index = string.match(job, '^([^/]+)/%d+/(%d+)$')
  if not set or #index > 15 then return nil end
  local chunk = math.floor(index / RATE_LINES)
  return prefix .. 'rates:' .. set .. '/' .. string.format('%.0f', chunk), (index - chunk * RATE_LINES) * RATE_GROUPS
end

-- Return whether `lane` is one of a subscription's lanes (a comma-separated list).
local function covers(lanes, lane) return string.find(',' .. (lanes or '') .. ',', ',' .. lane .. ',', 1, true) ~= nil end

-- Return whether the run keeps a history, which its first recorder enables.
local function keeps_history(prefix) return redis.call('HEXISTS', prefix .. 'history', 'backlog') == 1 end

-- Retire a group for `reason`: it will be swept, in a run that keeps a history once it is recorded. Nothing waits for
-- the recorder: groups beyond the backlog go unrecorded, and are counted. Its tokens go to `account`, except `parts` of
-- them (`spend`).
local function retire(prefix, job, reason, account, parts, held, checkpoints)
  local key = group_key_of(prefix, job)
  spend(prefix, key, account, parts, held)
  -- the account, which the rows of its history repeat
  redis.call('HSET', key, 'st', 'retiring', 'r', reason, 'ac', account, 'cp', checkpoints or '')
  local backlog = redis.call('HGET', prefix .. 'history', 'backlog')
  if backlog and redis.call('ZCARD', prefix .. 'unrecorded') < (number_of(backlog) or 0) then
    redis.call('ZADD', prefix .. 'unrecorded', now_ms(), job)
    return
  end
  redis.call('SADD', prefix .. 'retiring', job)
  if backlog then count(prefix, 'unrecorded') end
end

-- Record that the payload of a committed sample is lost; it is counted once, however many find it.
local function lose(prefix, job, k)
  local key = group_key_of(prefix, job)
  if redis.call('EXISTS', key) == 1 and redis.call('HSETNX', key, 'x:' .. k, 1) == 1 then
    redis.call('HSET', key, 'lost', 1)
    count(prefix, 'payload_lost')
    return 1
  end
  return 0
end

-- Return the name under which groups count the uses of a subscription: its own, or its pool's.
local function account_of(sub_key, name)
  local share = redis.call('HGET', sub_key, 'share')
  return share and share ~= '' and 'share:' .. share or name
end

-- Take from a member of a pool what was cut for it and not committed; the other members may use the groups again. Batch
-- numbers are reused, so the stream is rewritten: the id of an entry never decreases by itself. Returns the groups.
local function give_back(prefix, name, sub_key, batches_key)
  local s = numbers_of(sub_key, 'cursor', 'cut')
  if not s then return 0 end -- the committed batches are not known, and no group may be used twice
  local cursor, cut, given = s[1], s[2], 0
  if cut <= cursor then return 0 end
  local used, last, uses, bore = 'u:' .. account_of(sub_key, name), 'b:' .. name, 'h:' .. name, 'l:' .. name
  for _, entry in ipairs(redis.call('XRANGE', batches_key, (cursor + 1) .. '-0', '+')) do
    for job in string.gmatch(field(entry[2], 'j') or '', '[^,]+') do
      local key = group_key_of(prefix, job)
      if redis.call('EXISTS', key) == 1 and tonumber(redis.call('HGET', key, used) or 0) > 0 then
        redis.call('HDEL', key, used, last, uses, bore) -- a pool uses a group once
        given = given + 1
      end
    end
  end
  local kept, cum = redis.call('XRANGE', batches_key, '-', cursor .. '-0'), 0
  redis.call('DEL', batches_key)
  for _, entry in ipairs(kept) do
    redis.call('XADD', batches_key, entry[1], unpack(entry[2]))
    if entry[1] == cursor .. '-0' then cum = field(entry[2], 'cum') end
  end
  redis.call('HSET', sub_key, 'cut', cursor, 'cum', cum, 'ask', 0, 'bits', '')
  return given
end

local function leads(key, epoch, token)
  local l = redis.call('HMGET', key, 'epoch', 'token')
  return l[1] == epoch and l[2] == token
end

-- Return whether `role` is one of a subscription's roles (a comma-separated list; '' with a single trainer).
local function has_role(roles, role)
  if roles == '' then return role == '' end
  return string.find(',' .. roles .. ',', ',' .. role .. ',', 1, true) ~= nil
end

-- Parse 'ROLE:0110,ROLE:01' into role -> a '1' or '0' for each of its ranks.
local function role_bits(bits)
  local sets = {}
  for role, set in string.gmatch(bits or '', '([^:,]*):([01]+)') do sets[role] = set end
  return sets
end

local function owns(key, owner, gen)
  local s = redis.call('HMGET', key, 'owner', 'gen')
  return s[1] == owner and s[2] == gen
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

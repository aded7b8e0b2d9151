-- The history of a run: groups wait until the recorder has written their rows.
-- Keys: recorder, history, unrecorded

-- Return whether the run keeps a history, which its first recorder enables.
local function keeps_history(prefix) return redis.call('HEXISTS', prefix .. 'history', 'backlog') == 1 end

-- record: take or renew the right to record the run's history (recorder). The first call enables the history.
-- KEYS: recorder, history
-- ARGV: prefix, token, lease in ms, most groups that wait to be recorded, how long in ms they wait for a recorder,
--       newest epoch of the files: after a failover Redis may not know it
-- Returns: epoch, or 0 when another records
-- Atomic because two recorders must not write in one epoch, and no group may wait for a recorder that never ran.
local function record()
  local recorder_key, history_key = KEYS[1], KEYS[2]
  local prefix, token, lease_ms, backlog, patience_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local newest = tonumber(ARGV[6])

  freeing(prefix)
  local holder = redis.call('HMGET', recorder_key, 'token', 'epoch', 'lease')
  if holder[1] and holder[1] ~= token then
    if holder[3] then cap_lease(recorder_key, holder[3]) end
    return 0
  end
  local epoch = tonumber(holder[2] or 0)
  if epoch == 0 or epoch < newest then
    epoch = math.max(redis.call('HINCRBY', history_key, 'epoch', 1), newest + 1)
    redis.call('HSET', history_key, 'epoch', epoch)
  end
  redis.call('HSET', recorder_key, 'epoch', epoch, 'token', token, 'lease', lease_ms)
  redis.call('PEXPIRE', recorder_key, lease_ms)
  redis.call('HSET', history_key, 'backlog', backlog, 'patience', patience_ms, 'at', now_ms())
  return epoch
end

-- recorded: the rows of these groups are on disk, so that they may be swept (recorder).
-- KEYS: recorder, unrecorded, retiring
-- ARGV: prefix, epoch, token, then jobs
-- Returns: number of groups that waited for it, or -1 when another records
-- Atomic because a group is in exactly one of the two (I1). Repeating it changes nothing: swept groups wait for
-- nothing.
local function recorded()
  local recorder_key, unrecorded_key, retiring_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
  local first_job = 4

  freeing(prefix)
  if not leads(recorder_key, epoch, token) then return -1 end
  local moved = 0
  for i = first_job, #ARGV do
    if redis.call('ZREM', unrecorded_key, ARGV[i]) == 1 then
      redis.call('SADD', retiring_key, ARGV[i])
      moved = moved + 1
    end
  end
  return moved
end

-- unrecorded: count the groups that wait for the recorder; those that wait in vain are given up and may be swept
-- (leader).
-- KEYS: leader, recorder, history, unrecorded, retiring
-- ARGV: prefix, epoch, token, most groups to discard
-- Returns: {groups that wait, discarded by this call, discarded since the run began, ms since a recorder was running
--          (0: one is, -1: the run keeps no history)}, or -1 when the leadership is lost
-- Atomic because a group is in exactly one of the two (I1), and must not be discarded while a recorder is running
-- again. Groups wait in vain if they exceed the backlog, the newest first, and all of them once no recorder has run for
-- its patience, during which the leader called this server without a break: in an outage a recorder cannot report.
local function unrecorded()
  local leader_key, recorder_key, history_key = KEYS[1], KEYS[2], KEYS[3]
  local unrecorded_key, retiring_key = KEYS[4], KEYS[5]
  local prefix, epoch, token, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  if not keeps_history(prefix) then return {0, 0, 0, -1} end
  local h = numbers_of(history_key, 'backlog', 'patience', 'at') or {0, 0, 0}
  local backlog, patience, at = h[1], h[2], h[3]
  local function discarded() return tonumber(redis.call('HGET', prefix .. 'counters', 'unrecorded') or 0) end
  local waiting, away = redis.call('ZCARD', unrecorded_key), 0
  if redis.call('EXISTS', recorder_key) == 0 then away = math.max(1, now_ms() - at) end
  local vain = math.max(0, waiting - backlog)
  if away > 0 and contact(prefix, 'history', math.max(1000, patience / 2)) >= patience and away >= patience then
    vain = waiting
  end
  vain = math.min(vain, most)
  if vain <= 0 then return {waiting, 0, discarded(), away} end
  local jobs = redis.call('ZRANGE', unrecorded_key, -vain, -1)
  redis.call('ZREM', unrecorded_key, unpack(jobs))
  redis.call('SADD', retiring_key, unpack(jobs))
  count(prefix, 'unrecorded', #jobs)
  return {waiting - #jobs, #jobs, discarded(), away}
end

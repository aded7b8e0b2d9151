-- unrecorded: count the groups that wait for the recorder; those that wait in vain are given up and may be swept
-- (leader).
-- KEYS: leader, recorder, history, unrecorded, retiring
-- ARGV: prefix, epoch, token, most groups to discard
-- Returns: {groups that wait, discarded by this call, discarded since the run began, ms since a recorder was running
--          (0: one is, -1: the run keeps no history)}, or -1 when the leadership is lost
-- Atomic because a group is in exactly one of the two (I1), and must not be discarded while a recorder is running
-- again. Groups wait in vain if they exceed the backlog, the newest first, and all of them once no recorder has run for
-- its patience, during which the leader called this server without a break: in an outage a recorder cannot report.
local leader_key, recorder_key, history_key = KEYS[1], KEYS[2], KEYS[3]
local unrecorded_key, retiring_key = KEYS[4], KEYS[5]
local prefix, epoch, token, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
if not keeps_history(prefix) then return {0, 0, 0, -1} end
local h = numbers_of(history_key, 'backlog', 'patience', 'at') or {0, 0, 0}
local backlog, patience, at = h[1], h[2], h[3]
local function total() return tonumber(redis.call('HGET', prefix .. 'counters', 'unrecorded') or 0) end
local waiting, away = redis.call('ZCARD', unrecorded_key), 0
if redis.call('EXISTS', recorder_key) == 0 then away = math.max(1, now_ms() - at) end
local vain = math.max(0, waiting - backlog)
if away > 0 and contact(prefix, 'history', math.max(1000, patience / 2)) >= patience and away >= patience then
  vain = waiting
end
vain = math.min(vain, most)
if vain <= 0 then return {waiting, 0, total(), away} end
local jobs = redis.call('ZRANGE', unrecorded_key, -vain, -1)
redis.call('ZREM', unrecorded_key, unpack(jobs))
redis.call('SADD', retiring_key, unpack(jobs))
count(prefix, 'unrecorded', #jobs)
return {waiting - #jobs, #jobs, total(), away}

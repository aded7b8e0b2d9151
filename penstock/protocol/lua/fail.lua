-- fail: leased -> delayed, or dead when its attempts are used up or it can never succeed (worker).
-- KEYS: group:JOB, delayed, bodies
-- ARGV: prefix, job, token, worker, reason, detail, attempts allowed (0: dead at once), first wait in ms,
--       longest wait in ms, then per sample that is not committed: k, report of its tokens
-- Returns: 'delayed' | 'dead' | 'lost'
-- Atomic because the attempt is counted where the job moves.
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

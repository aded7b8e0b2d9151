-- fail: leased -> delayed, or dead when its tries are used up or it can never succeed (worker).
-- KEYS: group:JOB, delayed, bodies
-- ARGV: prefix, job, token, worker, reason, detail, tries allowed (0: bury at once), first wait in ms,
--       longest wait in ms
-- Returns: 'delayed' | 'dead' | 'lost'
-- Atomic because the try is counted where the job moves.
local prefix, job = ARGV[1], ARGV[2]
freeing(prefix)
local g = redis.call('HMGET', KEYS[1], 'st', 'tok', 'cl', 'eid')
if g[1] ~= 'leased' or g[2] ~= ARGV[3] then return 'lost' end
local body = take_entry(prefix, g[3], g[4])
local attempts = redis.call('HINCRBY', KEYS[1], 'att', 1)
count(prefix, 'failed')
count(prefix, 'failed:' .. ARGV[5])
if attempts >= tonumber(ARGV[7]) then
  bury(prefix, job, body, ARGV[5], ARGV[6], ARGV[4])
  return 'dead'
end
leave_inflight(prefix, job)
redis.call('ZADD', KEYS[2], now_ms() + math.min(tonumber(ARGV[8]) * 2 ^ (attempts - 1), tonumber(ARGV[9])), job)
redis.call('HSET', KEYS[3], job, body)
redis.call('HSET', KEYS[1], 'st', 'delayed')
redis.call('HDEL', KEYS[1], 'tok', 'own')
return 'delayed'

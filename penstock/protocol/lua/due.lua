-- due: delayed -> queued for jobs whose wait is over, by the server's clock (any part may call it).
-- KEYS: delayed, bodies
-- ARGV: prefix, most jobs
-- Returns: number of jobs queued
-- Atomic because two callers must not queue one job twice: only who removes it from `delayed` queues it.
local prefix = ARGV[1]
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, ARGV[2])
for _, job in ipairs(due) do
  if redis.call('ZREM', KEYS[1], job) == 1 then
    local g = redis.call('HMGET', group_key(prefix, job), 'ln', 'nb', 'c', 'pf')
    local body = redis.call('HGET', KEYS[2], job)
    redis.call('HDEL', KEYS[2], job)
    local begun = tonumber(g[3] or 0) > 0 or g[4]
    put_entry(prefix, begun and 'resume' or g[1], job, g[2], body)
  end
end
return #due

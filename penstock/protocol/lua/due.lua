-- due: delayed -> queued for jobs whose wait is over, by the server's clock (any process may call it).
-- KEYS: delayed, bodies
-- ARGV: prefix, most jobs
-- Returns: number of jobs queued
-- Atomic because two callers must not queue one job twice: the one that removes it from `delayed` queues it.
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

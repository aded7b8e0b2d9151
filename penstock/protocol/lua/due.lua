-- due: delayed -> queued for jobs whose wait is over, by the server's clock (any part may call it).
-- KEYS: delayed, bodies
-- ARGV: prefix, most jobs
-- Returns: number of jobs queued
-- Atomic because two callers must not queue one job twice: only who removes it from `delayed` queues it.
local delayed_key, bodies_key = KEYS[1], KEYS[2]
local prefix, most = ARGV[1], ARGV[2]

local now = now_ms()
local due = redis.call('ZRANGEBYSCORE', delayed_key, '-inf', now, 'LIMIT', 0, most)
-- what was failed while the clock was ahead: its wait would begin later than now
local at = 0
while #due < tonumber(most) do
  local last = redis.call('ZREVRANGE', delayed_key, at, at, 'WITHSCORES')
  local wait_ms = last[1] and redis.call('HGET', group_key_of(prefix, last[1]), 'wt')
  if not wait_ms or last[2] - wait_ms <= now then break end
  due[#due + 1], at = last[1], at + 1
end
for _, job in ipairs(due) do
  if redis.call('ZREM', delayed_key, job) == 1 then
    local g = redis.call('HMGET', group_key_of(prefix, job), 'ln', 'nb', 'c', 'pf')
    local body = redis.call('HGET', bodies_key, job)
    redis.call('HDEL', bodies_key, job)
    local begun = tonumber(g[3] or 0) > 0 or g[4]
    put_entry(prefix, begun and 'resume' or g[1], job, g[2], body)
  end
end
return #due

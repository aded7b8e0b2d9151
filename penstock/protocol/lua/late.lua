-- late: list begun train groups that were first leased too long ago (leader, if a policy needs it; read-only).
-- KEYS: inflight
-- ARGV: prefix, age in ms, most groups
-- Returns: per group {job, samples committed, samples wanted, age in ms}, oldest version first
-- Atomic because ages are by the server's clock, and a group's state and count belong together.
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

-- late: begun train groups that were first leased too long ago (leader, where a policy asks; read-only).
-- KEYS: inflight
-- ARGV: prefix, age in ms, most groups
-- Returns: per group {job, samples committed, samples wanted, age in ms}, oldest version first
-- Atomic because ages are by the server's clock, and a group's state and count belong together.
local now, found = now_ms(), {}
for _, job in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if #found >= tonumber(ARGV[3]) then break end
  local g = redis.call('HMGET', group_key(ARGV[1], job), 't0', 'c', 'n')
  local age = now - tonumber(g[1] or now)
  if age >= tonumber(ARGV[2]) then found[#found + 1] = {job, tonumber(g[2] or 0), tonumber(g[3] or 0), age} end
end
return found

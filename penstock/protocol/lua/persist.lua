-- persist: written -> kept, on a payload server (leader; at ingest and again at its start).
-- KEYS: each committed sample's payload:SAMPLE:TOKEN
-- ARGV: none
-- Returns: per key 1 when it is permanent now, 0 when it is gone
-- Atomic only because it is one round trip; repeating it changes nothing.
local kept = {}
for i, key in ipairs(KEYS) do
  local done = redis.call('PERSIST', key)
  if done == 0 then done = redis.call('EXISTS', key) end
  kept[i] = done
end
return kept

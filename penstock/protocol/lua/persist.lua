-- persist: written -> kept, on a payload server (leader; at ingest and again at its start).
-- KEYS: payload:SAMPLE:TOKEN of committed samples
-- ARGV: none
-- Returns: per key 1 when it is permanent now, 0 when it is gone
-- Atomic only because it is one round trip; asking again changes nothing.
local kept = {}
for i = 1, #KEYS do
  local done = redis.call('PERSIST', KEYS[i])
  if done == 0 then done = redis.call('EXISTS', KEYS[i]) end
  kept[i] = done
end
return kept

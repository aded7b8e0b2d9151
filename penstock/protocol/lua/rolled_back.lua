-- rolled_back: Redis forgot acknowledged writes (failover, power loss); what is known of it is kept (any buffer).
-- KEYS: counters
-- ARGV: prefix, then per counter: name, the most that somebody has seen of it: its value and what was reported of it
-- Returns: per counter of which more is lost than was reported: name, how much more
-- Atomic because several have seen the counters, and what one of them has reported the others must not report again.
local counters_key = KEYS[1]
local prefix = ARGV[1]
local first_counter = 2

freeing(prefix)
local lost = {}
for i = first_counter, #ARGV, 2 do
  local name, seen = ARGV[i], tonumber(ARGV[i + 1])
  local now = numbers_of(counters_key, name, 'rolled_back:' .. name)
  local more = now and seen - now[1] - now[2] or 0
  if more > 0 then
    redis.call('HINCRBY', counters_key, 'rolled_back:' .. name, more)
    lost[#lost + 1] = name
    lost[#lost + 1] = more
  end
end
if #lost > 0 then count(prefix, 'rolled_back') end
return lost

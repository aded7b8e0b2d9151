-- rolled_back: Redis lost acknowledged writes (failover, power loss); keep what is known of it (any buffer).
-- KEYS: counters
-- ARGV: prefix, then per counter: name, the largest observed sum of its value and what was reported of it
-- Returns: per counter that lost more than was reported: name, how much more
-- Atomic because several processes observe the counters, and a loss reported by one must not be reported again.
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

-- lost: the payload of a cut sample is gone (trainer that tried to read it).
-- KEYS: counters (unused; it names the hash slot)
-- ARGV: prefix, then per sample: job, k, token that committed it
-- Returns: those that were not reported before, by their place in ARGV (from 0)
-- Atomic because every rank and every delivery may report it, and it counts once. If a rollback of Redis undid a
-- commit,
-- the sample is generated again, and committed under another token: the payload of that one is not gone.
local prefix = ARGV[1]
local first_sample = 2

freeing(prefix)
local new = {}
for i = first_sample, #ARGV, 3 do
  local job, k, token = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local is_there = redis.call('HGET', group_key_of(prefix, job), 's:' .. k) == token
  if is_there and lose(prefix, job, k) == 1 then new[#new + 1] = (i - first_sample) / 3 end
end
return new

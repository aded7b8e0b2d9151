-- reward: leased -> ready for a group all of whose samples are committed: its group reward (worker).
-- KEYS: group:JOB, meta:JOB
-- ARGV: prefix, job, token, records of all its samples with their rewards
-- Returns: 'ready' | 'lost' (the lease is another's) | 'missing' (a sample is not committed, or no group reward is due)
-- Atomic because rewards must be written once, by the holder of the lease (I3), in the instant in which the group may
-- be used; a complete group gets no more commits, so its records are those that the holder has read. Repeating it with
-- the same token changes nothing.
local group_key, meta_key = KEYS[1], KEYS[2]
local prefix, job, token, records = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

freeing(prefix) -- it leads to a cut, and that to retirement
local g = redis.call('HMGET', group_key, 'st', 'tok', 'n', 'c', 'cl', 'eid', 'rw')
if g[1] ~= 'leased' or g[2] ~= token then
  if g[7] == token then return 'ready' end
  count(prefix, 'refused')
  return 'lost'
end
if g[7] ~= '1' or g[4] ~= g[3] then return 'missing' end
require_lane(prefix, g[5])
redis.call('SET', meta_key, records)
redis.call('HSET', group_key, 'rw', token)
complete(prefix, job, g[5], g[6])
count(prefix, 'group_rewards')
return 'ready'

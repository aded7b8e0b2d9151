-- keep: the payloads of ready groups are permanent now; a group may be cut once all of its samples are kept.
-- KEYS: leader
-- ARGV: prefix, epoch, token, then per group: job, samples kept or lost for good, k of those lost (with commas)
-- Returns: number of groups that were still ready, or -1 when the leadership is lost
-- Atomic because only the leader may say so (LEAD).
local leader_key = KEYS[1]
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local first_group = 4

local kept = 0
freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
for i = first_group, #ARGV, 3 do
  local job, num_kept, lost = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local key = group_key_of(prefix, job)
  if redis.call('HGET', key, 'st') == 'ready' then
    redis.call('HSET', key, 'kept', num_kept)
    for k in string.gmatch(lost, '%d+') do lose(prefix, job, k) end
    kept = kept + 1
  end
end
return kept

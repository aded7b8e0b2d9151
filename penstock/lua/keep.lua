-- keep: the payloads of ready groups are permanent now; a group may be cut once all of its samples are kept.
-- KEYS: leader
-- ARGV: prefix, epoch, token, then per group: job, samples kept or lost for good
-- Returns: number of groups that were still ready, or -1 when the leadership is lost
-- Atomic because only the leader may say so (LEAD).
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
local kept = 0
for i = 4, #ARGV, 2 do
  local key = group_key(ARGV[1], ARGV[i])
  if redis.call('HGET', key, 'st') == 'ready' then
    redis.call('HSET', key, 'kept', ARGV[i + 1])
    kept = kept + 1
  end
end
return kept

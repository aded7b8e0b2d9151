-- keep: the payloads of ready groups are permanent now; a group may be cut once all of its samples are kept.
-- KEYS: leader
-- ARGV: prefix, epoch, token, then per group: job, samples kept or lost for good, k of those lost (with commas)
-- Returns: number of groups that were still ready, or -1 when the leadership is lost
-- Atomic because only the leader may say so (LEAD).
local prefix, kept = ARGV[1], 0
freeing(prefix)
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
for i = 4, #ARGV, 3 do
  local key = group_key(prefix, ARGV[i])
  if redis.call('HGET', key, 'st') == 'ready' then
    redis.call('HSET', key, 'kept', ARGV[i + 1])
    for k in string.gmatch(ARGV[i + 2], '%d+') do lose(prefix, ARGV[i], k) end
    kept = kept + 1
  end
end
return kept

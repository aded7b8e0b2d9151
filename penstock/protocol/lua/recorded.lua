-- recorded: the rows of these groups are on disk, so that they may be swept (recorder).
-- KEYS: recorder, unrecorded, retiring
-- ARGV: prefix, epoch, token, then jobs
-- Returns: number of groups that waited for it, or -1 when another records
-- Atomic because a group is in exactly one of the two (I1). Repeating it changes nothing: swept groups wait for
-- nothing.
local recorder_key, unrecorded_key, retiring_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local first_job = 4

freeing(prefix)
if not leads(recorder_key, epoch, token) then return -1 end
local moved = 0
for i = first_job, #ARGV do
  if redis.call('ZREM', unrecorded_key, ARGV[i]) == 1 then
    redis.call('SADD', retiring_key, ARGV[i])
    moved = moved + 1
  end
end
return moved

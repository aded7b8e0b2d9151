-- sweep: retiring -> gone; its payloads are unlinked already (leader). Groups that wait for the recorder stay.
-- KEYS: leader
-- ARGV: prefix, epoch, token, then per group: job, n
-- Returns: number of groups gone, or -1 when the leadership is lost
-- Atomic because a group must not be deleted in part.
local leader_key = KEYS[1]
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local first_group = 4

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local gone = 0
for i = first_group, #ARGV, 2 do
  local job, n = ARGV[i], tonumber(ARGV[i + 1])
  local key = group_key_of(prefix, job)
  local waits = redis.call('ZSCORE', prefix .. 'unrecorded', job)
  if redis.call('HGET', key, 'st') == 'retiring' and not waits then
    for k = 0, n - 1 do redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. k) end
    redis.call('DEL', key, prefix .. 'meta:' .. job)
    redis.call('SREM', prefix .. 'retiring', job)
    gone = gone + 1
  end
end
if gone > 0 then count(prefix, 'swept', gone) end
return gone

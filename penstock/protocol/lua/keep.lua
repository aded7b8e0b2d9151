-- keep: the payloads of ready groups are permanent now; a group may be cut once all of its samples are kept. The share
-- of its right answers is recorded for its prompt.
-- KEYS: leader
-- ARGV: prefix, epoch, token, then per group: job, samples kept or lost for good, k of those lost (with commas), its
--       share (1: no answer is right, ... 255: all are; 0: its group is not counted)
-- Returns: number of groups that were still ready, or -1 when the leadership is lost
-- Atomic because only the leader may report this (LEAD), and because a group counts once: a mark is written with the
-- count, so another leader, or a repeated call, does not count it again.
local leader_key = KEYS[1]
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local first_group = 4

local kept = 0
freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end

-- Insert the share of one more group before the prompt's earlier ones; the oldest is removed.
local function count_share(key, job, share)
  local rates, at = rate_place_of(prefix, job)
  if not rates or redis.call('HSETNX', key, 'ps', share) == 0 then return end
  local known = redis.call('GETRANGE', rates, at, at + RATE_GROUPS - 2)
  redis.call('SETRANGE', rates, at, string.char(share) .. known)
end

for i = first_group, #ARGV, 4 do
  local job, num_kept, lost, share = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
  local key = group_key_of(prefix, job)
  if redis.call('HGET', key, 'st') == 'ready' then
    redis.call('HSET', key, 'kept', num_kept)
    for k in string.gmatch(lost, '%d+') do lose(prefix, job, k) end
    if share > 0 then count_share(key, job, share) end
    kept = kept + 1
  end
end
return kept

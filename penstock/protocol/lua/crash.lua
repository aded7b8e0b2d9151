-- crash: leased -> queued on resume or suspect, or dead (worker whose engine died under the job).
-- KEYS: group:JOB, trials:MODEL, aside:MODEL
-- ARGV: prefix, job, token, worker, detail, publication that the engine had (VERSION-REV, '' for none), the engine's
--       name (one for each start), 1: it had finished something since it started, crashes that set a publication aside,
--       then per sample that is not committed: k, report of its tokens
-- Returns: 'resume' | 'suspect' | 'dead', or 'lost'
-- Atomic as release; the charge and the move are one. If several engines crashed on a publication on which none has
-- finished anything, it is to blame: it is set aside, and jobs are not charged for it, nor for their earlier crashes on
-- it.
local group_key, trials_key, aside_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, job, token, worker, detail = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local publication, engine, sure, max_deaths = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])
local first_told = 10

freeing(prefix)
local g = redis.call('HMGET', group_key, 'st', 'tok', 'cl', 'eid', 'nb', 'ln')
if g[1] ~= 'leased' or g[2] ~= token then return 'lost' end
tell_all(prefix, group_key, g[6], ARGV, first_told)
local body = take_entry(prefix, g[3], g[4])

local function set_aside()
  redis.call('HSET', aside_key, publication, detail)
  count(prefix, 'set_aside')
  for _, lane in ipairs({'suspect', 'resume'}) do
    for _, place in ipairs(redis.call('ZRANGE', line_key_of(prefix, lane), 0, -1)) do
      local eid = entry_of(place)
      local entry = redis.call('XRANGE', lane_key_of(prefix, lane), eid, eid)[1]
      local other = entry and field(entry[2], 'id')
      if other and discharge(prefix, other, publication) and lane == 'suspect' then
        take_entry(prefix, lane, eid)
        put_entry(prefix, 'resume', other, field(entry[2], 'nb'), field(entry[2], 'body'))
      end
    end
  end
end

local function is_to_blame()
  if publication == '' then return false end
  if redis.call('HEXISTS', aside_key, publication) == 1 then return true end
  if redis.call('HEXISTS', trials_key, 'ok:' .. publication) == 1 then return false end
  if redis.call('HSETNX', trials_key, 'by:' .. publication .. ':' .. engine, 1) == 0 then return false end
  if redis.call('HINCRBY', trials_key, 'dead:' .. publication, 1) < max_deaths then return false end
  set_aside()
  return true
end

if is_to_blame() then
  end_try(group_key, 'crashed, not charged')
  local own = discharge(prefix, job, publication)
  leave_inflight(prefix, job)
  local target = g[3] == 'suspect' and not own and 'suspect' or 'resume'
  put_entry(prefix, target, job, g[5], body)
  count(prefix, 'released')
  return target
end
end_try(group_key, 'crashed')
return crashed(prefix, job, g[3], body, detail, worker, sure == '1', publication)

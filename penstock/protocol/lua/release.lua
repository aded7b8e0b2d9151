-- release: leased -> queued on lane resume, without a charge (worker that drains, or restarts); charged if workers
-- died of an error under it (`handed_back` in _common.lua).
-- KEYS: group:JOB
-- ARGV: prefix, job, token, worker, error that ends the worker ('' if it drains), then per sample that is not
--       committed: k, report of its tokens
-- Returns: the lane where the job is queued, 'dead', or 'lost'
-- Atomic because the job must be in exactly one lane at every instant (I1).
local group_key = KEYS[1]
local prefix, job, token, worker, death = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local first_told = 6

freeing(prefix)
local g = redis.call('HMGET', group_key, 'st', 'tok', 'cl', 'eid', 'ln')
if g[1] ~= 'leased' or g[2] ~= token then return 'lost' end
tell_all(prefix, group_key, g[5], ARGV, first_told)
local body = take_entry(prefix, g[3], g[4])
if death == '' then end_try(group_key, 'released') else end_try(group_key, 'died') end
return handed_back(prefix, job, g[3], body, worker, death)

-- transfer_report: a worker reports that its engine is paused and may be written to, or the result; the trainer's
-- driver reports where the engine finds the weights, or that they were sent (worker, driver).
-- KEYS: transfer:MODEL
-- ARGV: prefix, id (VERSION-REV), field (f:WORKER frozen | h:WORKER where | s:WORKER sent | r:WORKER received), text
-- Returns: 1, or 0 when the current transfer is of another version
-- Atomic because a late report must not count for the next version.
local transfer_key = KEYS[1]
local prefix, id, name, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

freeing(prefix)
if redis.call('HGET', transfer_key, 'id') ~= id then return 0 end
redis.call('HSET', transfer_key, name, text)
return 1

-- transfer_decide: decide who receives a version, and how; the others load it from disk (the trainer's driver).
-- KEYS: transfer:MODEL, transfers:MODEL
-- ARGV: prefix, id (VERSION-REV), decision record
-- Returns: 1, or 0 when the current transfer is of another version
-- Atomic because the decision closes the enrollment that it uses.
local transfer_key, decisions_key = KEYS[1], KEYS[2]
local prefix, id, decision = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
if redis.call('HGET', transfer_key, 'id') ~= id then return 0 end
redis.call('HSET', transfer_key, 'st', 'closed')
redis.call('XADD', decisions_key, 'MAXLEN', '~', 64, '*', 'id', id, 'd', decision)
return 1

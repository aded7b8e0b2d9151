-- room: how full the gate is for each driving subscription (producer and leader that tell why they wait; read-only).
-- KEYS: sub:NAME of every driving subscription
-- ARGV: prefix
-- Returns: per subscription {places free (negative: too many), places in all}
-- Atomic because the stock is a difference of numbers that move together.
local rooms = {}
local admitted, gone = stock_of(ARGV[1])
for i = 1, #KEYS do rooms[i] = {places(KEYS[i], admitted, gone)} end
return rooms

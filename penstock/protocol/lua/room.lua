-- room: how full each gate is (producer and leader that tell why they wait; read-only).
-- KEYS: subs, then sub:NAME of every subscription that a gate counts
-- ARGV: prefix, per sub:NAME the number of its gate from 1 (commas; members of a pool share one)
-- Returns: per gate {places free (negative: too many), places in all}
-- Atomic because the stock is a difference of numbers that move together.
local rooms = {}
local admitted, gone = stock_of(ARGV[1])
for number, members in ipairs(gates_of(KEYS, 2, ARGV[2])) do
  rooms[number] = {places(KEYS[1], members, admitted, gone)}
end
return rooms

"""One step of a shared budget as a Lua script: what `consumers/limits/` (bucket, order, account) decides in a process.

An account is one string: its levels, its lanes' parts, what was learned of it, and for each process that waits the
first of its lanes, so that order holds across processes. A process that says nothing for a while is forgotten.
"""

from typing import Final

from consumers.state.redis_scripts import Script

STEP: Final = Script(
    """
local LEAST = 0.000001
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local asked = cjson.decode(ARGV[1])
local shares, boosts, lanes = asked.shares, asked.boosts, #asked.shares
local raw = redis.call('GET', KEYS[1])
local account = raw and cmsgpack.unpack(raw)
if not account then
  account = {
    at = now, levels = {}, parts = {}, waiting = {},
    version = asked.version, learned = ARGV[2], stopped_until = asked.stopped_until,
    limits = asked.limits, bursts = asked.bursts, most = asked.most, guessed = asked.guessed,
  }
  for d = 1, 3 do
    account.levels[d] = asked.bursts[d]
    account.parts[d] = {}
    for l = 1, lanes do account.parts[d][l] = shares[l] * account.levels[d] end
  end
end
local levels, parts = account.levels, account.parts
if now < account.at - 1 then  -- the clock was put back: what was to be later would be very late
  account.stopped_until, account.waiting = account.stopped_until - (account.at - now), {}
end
local waiting = account.waiting
for process, its in pairs(waiting) do
  if its.expires < now then waiting[process] = nil end
end

-- The first of each lane, of all processes; of our own, the next of those that we were told of.
local own = {}
for l = 1, lanes do own[l] = {} end
local gone = {}
local function first_of(l)
  local first = nil
  for process, its in pairs(waiting) do
    local found = its.heads[tostring(l)]
    if found and process ~= asked.process and not gone[process .. l] then
      if not first or found.arrived < first.arrived then
        first = found
        first.process = process
      end
    end
  end
  local mine = own[l][1]
  if mine and (not first or mine.arrived <= first.arrived) then return mine end
  return first
end

local function lower(d, level)
  if level >= levels[d] then return end
  levels[d] = level
  local claimed = 0
  for l = 1, lanes do claimed = claimed + math.max(0, parts[d][l]) end
  for l = 1, lanes do
    if claimed > level and parts[d][l] > 0 then parts[d][l] = parts[d][l] * level / claimed end
  end
end
local burst, full, caps, per_s = {}, {}, {}, {}
local function size()
  for d = 1, 3 do
    burst[d], per_s[d] = account.bursts[d], account.limits[d] / 60
    lower(d, burst[d])
    full[d], caps[d] = {}, caps[d] or {}
    for l = 1, lanes do full[d][l] = shares[l] * burst[d] end
  end
end
local function want()
  for l = 1, lanes do
    local first = first_of(l)
    for d = 1, 3 do
      caps[d][l] = math.min(full[d][l] + (first and first.amounts[d] or 0), burst[d])
    end
  end
end

-- What came in since the last step, by what was known then.
size()
local before = waiting[asked.process]
for l = 1, lanes do
  own[l][1] = before and before.heads[tostring(l)]
end
want()
local passed = math.max(0, now - account.at)
account.at = now
for d = 1, 3 do
  local gained = passed * per_s[d]
  levels[d] = math.min(burst[d], levels[d] + gained)
  for l = 1, lanes do
    parts[d][l] = math.min(caps[d][l], parts[d][l] + gained * shares[l])
  end
end

-- What was learned, given back, and found to be wrong.
local is_news = asked.version ~= account.version
if asked.changed and not is_news then
  for d = 1, 3 do
    local more = asked.bursts[d] - account.bursts[d]
    if account.guessed[d] and not asked.guessed[d] and more > 0 then  -- it was there, and nobody knew
      levels[d] = levels[d] + more
      for l = 1, lanes do parts[d][l] = parts[d][l] + shares[l] * more end
    end
  end
  account.version, account.learned, account.stopped_until = account.version + 1, ARGV[2], asked.stopped_until
  account.limits, account.bursts = asked.limits, asked.bursts
  account.most, account.guessed = asked.most, asked.guessed
  size()
end
for _, back in ipairs(asked.back) do
  for d = 1, 3 do
    local l, over, from_part = back.lane, back.over[d], back.own[d]
    if over > 0 then
      levels[d] = math.min(burst[d], levels[d] + over)
      parts[d][l] = math.min(caps[d][l], parts[d][l] + math.min(over, from_part))
    elseif over < 0 then
      levels[d] = levels[d] + over
      parts[d][l] = parts[d][l] - math.min(math.max(parts[d][l], 0), -over)
    end
  end
end
for d = 1, 3 do
  if asked.lower[d] >= 0 then lower(d, asked.lower[d]) end
end

-- Whose turn it is.
for l = 1, lanes do own[l] = {} end
for i, waiter in ipairs(asked.waiters) do
  local line = own[waiter.lane]
  line[#line + 1] = {index = i, arrived = now - waiter.age, amounts = waiter.amounts}
end

local function part_wait(l, amounts)
  local longest = 0
  for d = 1, 3 do
    local missing = math.min(amounts[d], burst[d]) - parts[d][l]
    if amounts[d] > 0 and missing > 0 then
      longest = math.max(longest, shares[l] > 0 and missing / (shares[l] * per_s[d]) or 1e9)
    end
  end
  return longest
end
local function level_wait(amounts)
  local longest = 0
  for d = 1, 3 do
    local missing = math.min(amounts[d] + LEAST, burst[d]) - levels[d]
    if amounts[d] > 0 and missing > 0 then longest = math.max(longest, missing / per_s[d]) end
  end
  return longest
end
local function shared_wait(l, amounts)
  local longest = 0
  for d = 1, 3 do
    local free, slope, next_full = levels[d], 1, (burst[d] - levels[d]) / per_s[d]
    for other = 1, lanes do
      local part = parts[d][other]
      if other ~= l then
        if part > 0 then free = free - part end
        if part < caps[d][other] and shares[other] > 0 then
          slope = slope - shares[other]
          next_full = math.min(next_full, (caps[d][other] - part) / (shares[other] * per_s[d]))
        end
      end
    end
    local missing = amounts[d] + LEAST - free
    if amounts[d] > 0 and missing > 0 and levels[d] < burst[d] then
      local wait = slope > 0 and math.min(missing / (slope * per_s[d]), next_full) or next_full
      longest = math.max(longest, math.max(wait, 0.001))
    end
  end
  return longest
end
local function rank(l, first)
  if l > 1 and boosts[l] >= 0 and now - first.arrived >= boosts[l] then return l - 1 end
  return l
end

local granted, ours_left = {}, now < account.stopped_until and 0 or asked.room
local lent = {}
local function take(l, first, all)
  local from_parts, before = {}, {levels[1], levels[2], levels[3]}
  for d = 1, 3 do
    local part, amount = parts[d][l], first.amounts[d]
    local taken = all and amount or math.min(math.max(part, 0), amount)
    levels[d] = math.min(levels[d], account.most[d]) - amount
    parts[d][l], from_parts[d] = part - taken, taken
  end
  if first.index then
    table.remove(own[l], 1)
    granted[#granted + 1] = {first.index, from_parts[1], from_parts[2], from_parts[3]}
    ours_left = ours_left - 1
    if ours_left <= 0 then
      for each = 1, lanes do own[each] = {} end
    end
  else  -- another process's: it comes for it, and until then it is kept for it
    gone[first.process .. l] = true
    lent[#lent + 1] = {l, {before[1] - levels[1], before[2] - levels[2], before[3] - levels[3]}, from_parts}
  end
  want()
end
local look_in = -1
local function sooner(wait) if look_in < 0 or wait < look_in then look_in = wait end end
if ours_left <= 0 then
  for each = 1, lanes do own[each] = {} end
end
want()
while true do
  local done, owed, first, first_lane, first_rank = true, false, nil, nil, nil
  look_in = -1
  for l = 1, lanes do
    local head = first_of(l)
    if head then
      local wait = part_wait(l, head.amounts)
      if wait == 0 then
        wait = level_wait(head.amounts)
        if wait == 0 then
          take(l, head, true)
          done = false
          break
        end
        owed = true
      end
      if head.index then sooner(wait) end
      local its = rank(l, head)
      if l > 1 and boosts[l] >= 0 and its == l then sooner(head.arrived + boosts[l] - now) end
      if not first or its < first_rank or (its == first_rank and head.arrived < first.arrived) then
        first, first_lane, first_rank = head, l, its
      end
    end
  end
  if done and first and not owed then
    local wait = shared_wait(first_lane, first.amounts)
    if wait == 0 then
      take(first_lane, first, false)
      done = false
    else
      sooner(wait)
    end
  end
  if done then break end
end
for i = #lent, 1, -1 do
  local l, amounts, from_parts = lent[i][1], lent[i][2], lent[i][3]
  for d = 1, 3 do
    levels[d] = levels[d] + amounts[d]
    parts[d][l] = parts[d][l] + from_parts[d]
  end
end

-- Who waits still.
local heads, any = {}, false
for l = 1, lanes do
  local mine = own[l][1]
  if mine then
    heads[tostring(l)] = {arrived = mine.arrived, amounts = mine.amounts}
    any = true
  end
end
waiting[asked.process] = any and {expires = now + asked.expires_s, heads = heads, sums = asked.sums} or nil
local elsewhere = {}
for l = 1, lanes do elsewhere[l] = {0, 0, 0} end
for process, its in pairs(waiting) do
  for l, head in pairs(its.heads) do head.process = nil end
  if process ~= asked.process then
    for l = 1, lanes do
      for d = 1, 3 do elsewhere[l][d] = elsewhere[l][d] + its.sums[l][d] end
    end
  end
end
redis.call('SET', KEYS[1], cmsgpack.pack(account), 'PX', 3600000)
return {
  string.format('%.6f', now),
  cjson.encode({granted = granted, look_in = look_in, levels = levels, parts = parts, elsewhere = elsewhere,
    version = account.version}),
  is_news and account.learned or '',
}
"""
)

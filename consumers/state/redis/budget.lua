-- Grants waiting requests the budget of an account that several processes share. One run of this script is called a
-- step. It decides like consumers/limits does within a process (account.py);
-- tests/consumers/state/test_same_grants.py checks that both make the same grants.
--
-- An account is stored as one string. It has the levels of the three token buckets, its lanes with what each has saved
-- of the buckets (`parts`), what was learned about the limits, and, for each process, the first waiting request (waiter) of each lane,
-- so that requests of all processes are granted in their order. The waiters of a process that has run no step for a
-- while are removed. Processes may know different lanes: an account has all that were used within an hour, by rank.

-- The arithmetic of the three buckets, like consumers/limits/account.py, which explains it. `d` is the number of a
-- bucket, `l` the number of a lane (1 is the most urgent).
local LEAST = 0.000001
local lanes, shares, levels, parts
local burst, most, reserves, wants, caps, holds, per_s = {}, {}, {}, {}, {}, {}, {}
local function lower(d, level)
  if level >= levels[d] then return end
  levels[d] = level
  local claimed = 0
  for l = 1, lanes do claimed = claimed + math.max(0, parts[d][l]) end
  for l = 1, lanes do
    if claimed > level and parts[d][l] > 0 then parts[d][l] = parts[d][l] * level / claimed end
  end
end
local function spend(d, l, amount)
  local part = parts[d][l]
  local taken = (amount <= part or part >= burst[d]) and amount or math.max(part, 0)
  levels[d], parts[d][l] = math.min(levels[d], most[d]) - amount, part - taken
  return taken
end
local function held(d, l)
  local part = parts[d][l]
  if part <= holds[d][l] or part >= caps[d][l] then return math.max(0, part) end
  return holds[d][l]
end
-- Seconds until the level of bucket `d` covers `kept` (what a request of lane `l` needs, and what is kept for more
-- urgent lanes) and the savings that will then be held for the less urgent lanes.
local function left_in(d, kept, l, is_first)
  if is_first and levels[d] >= burst[d] then return 0 end
  local missing = kept
  for below = l + 1, lanes do missing = missing + held(d, below) end
  missing = missing - levels[d]
  if missing <= 0 then return 0 end
  local full_in, rate, passed, filling = (burst[d] - levels[d]) / per_s[d], per_s[d], 0, {}
  for other = l + 1, lanes do
    local part, gains = parts[d][other], shares[other] * per_s[d]
    if part < holds[d][other] then
      if part < 0 then return math.min(is_first and full_in or 1e9, missing / per_s[d]) end
      filling[#filling + 1] = {(holds[d][other] - part) / gains, gains}
      rate = rate - gains
    end
  end
  table.sort(filling, function(x, y) return x[1] < y[1] end)
  for _, full in ipairs(filling) do
    local reached = missing - rate * (full[1] - passed)
    if reached <= 0 then break end
    missing, passed, rate = reached, full[1], rate + full[2]
  end
  local wait = rate > 0 and passed + missing / rate or 1e9
  if wait <= full_in then return wait end
  return is_first and full_in or 1e9
end
local function wait_of(amounts, l)
  local longest = 0
  for d = 1, 3 do
    local amount = amounts[d]
    if amount > 0 then
      local whole, saved = math.min(amount + LEAST, burst[d]), math.min(amount, burst[d])
      local part, level_in, wait = parts[d][l], 0, 0
      if levels[d] < whole then level_in = (whole - levels[d]) / per_s[d] end
      if part >= saved then
        wait = level_in
      else
        local kept, is_first = amount + LEAST, true
        if l == 1 and amount >= reserves[d][l] then kept = reserves[d][l] + LEAST end
        for above = 1, l - 1 do
          local wanted = wants[d][above]
          kept = kept + (reserves[d][above] + wanted)
          is_first = is_first and wanted == 0
        end
        for below = l + 1, lanes do
          local needs = math.min(wants[d][below], burst[d])
          is_first = is_first and not (needs > 0 and needs <= parts[d][below])
        end
        wait = math.max(level_in, left_in(d, kept, l, is_first))
        if wait > 0 then wait = math.min(wait, math.max(level_in, (saved - part) / (shares[l] * per_s[d]))) end
      end
      longest = math.max(longest, wait)
    end
  end
  return longest
end

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local asked = cjson.decode(ARGV[1])
local raw, account, is_forgotten = redis.call('GET', KEYS[1]), nil, false
if raw then
  local is_unpacked, found = pcall(cmsgpack.unpack, raw)
  if is_unpacked and type(found) == 'table' and found.form == asked.form then account = found end
  is_forgotten = not account
end
if not account then
  account = {
    form = asked.form, at = now, levels = {}, lanes = {}, waiting = {},
    version = asked.version, learned = ARGV[2], stopped_until = asked.stopped_until,
    limits = asked.limits, bursts = asked.bursts, most = asked.most, guessed = asked.guessed,
  }
  for d = 1, 3 do account.levels[d] = asked.bursts[d] end
  for i, name in ipairs(asked.lanes) do
    account.lanes[i] = {name = name, saved = {}}
    for d = 1, 3 do account.lanes[i].saved[d] = asked.shares[i] * account.levels[d] end
  end
end
-- `number_of`: for each lane of the process that runs this step, its number among all lanes
local found, number_of, names = {}, {}, {}
for _, lane in ipairs(account.lanes) do found[lane.name] = lane end
for i, name in ipairs(asked.lanes) do
  local lane = found[name] or {name = name, saved = {0, 0, 0}}
  lane.rank, lane.share, lane.used, found[name] = asked.ranks[i], asked.shares[i], now, lane
end
account.lanes = {}
for _, lane in pairs(found) do
  if lane.used > now - 3600 then account.lanes[#account.lanes + 1] = lane end
end
table.sort(account.lanes, function(x, y) return x.rank < y.rank or x.rank == y.rank and x.name < y.name end)
lanes, shares, levels, parts = #account.lanes, {}, account.levels, {{}, {}, {}}
for l, lane in ipairs(account.lanes) do
  names[l], shares[l] = lane.name, lane.share
  for d = 1, 3 do parts[d][l] = lane.saved[d] end
  for i, name in ipairs(asked.lanes) do
    if name == lane.name then number_of[i] = l end
  end
end
if now < account.at - 1 then  -- the clock was set back, so that stored times would lie far in the future
  account.stopped_until, account.waiting = account.stopped_until - (account.at - now), {}
end
local waiting = account.waiting
for process, its in pairs(waiting) do
  if its.expires < now then waiting[process] = nil end
end

-- `own`: for each lane, the waiters of the process that runs this step. `own_left`: how many of them may still be
-- granted in this step; if it is 0, none of them counts as the first of its lane.
local own, own_left = {}, 1
for l = 1, lanes do own[l] = {} end
local function own_first(l) return own_left > 0 and own[l][1] or nil end
-- Returns the first waiter of a lane among all processes, and its process (nil if that is the one that runs this step).
local gone = {}
local function first_of(l)
  local first, of = nil, nil
  for process, its in pairs(waiting) do
    local found = its.heads[names[l]]
    if found and process ~= asked.process and not gone[process .. l] and
      (not first or found.arrived < first.arrived) then
      first, of = found, process
    end
  end
  local mine = own_first(l)
  if mine and (not first or mine.arrived <= first.arrived) then return mine end
  return first, of
end

local function size()
  for d = 1, 3 do
    burst[d], most[d], per_s[d] = account.bursts[d], account.most[d], account.limits[d] / 60
    lower(d, burst[d])
    reserves[d], wants[d], caps[d], holds[d] = {}, wants[d] or {}, caps[d] or {}, {}
    for l = 1, lanes do reserves[d][l] = shares[l] * burst[d] end
  end
end
local function want()
  for l = 1, lanes do
    local first = first_of(l)
    for d = 1, 3 do
      local amount = first and first.amounts[d] or 0
      wants[d][l] = amount
      caps[d][l] = amount <= reserves[d][l] and reserves[d][l] or math.min(amount, burst[d])
    end
  end
  for d = 1, 3 do
    local others = 0
    for l = 2, lanes do others = others + reserves[d][l] end
    local room = burst[d] - caps[d][1] - others
    holds[d][1] = reserves[d][1]
    for l = 2, lanes do
      local more = math.max(0, math.min(caps[d][l] - reserves[d][l], room))
      holds[d][l] = reserves[d][l] + more
      room = room - more
    end
  end
end

-- Let the buckets refill for the time since the last step, by the limits and the first waiters that the last step
-- stored.
size()
local before = waiting[asked.process]
for l = 1, lanes do
  own[l][1] = before and before.heads[names[l]]
end
want()
local passed = math.max(0, now - account.at)
account.at = now
for d = 1, 3 do
  local gained = passed * per_s[d]
  levels[d] = math.min(burst[d], levels[d] + gained)
  for l = 1, lanes do
    local part, cap, saved = parts[d][l], caps[d][l], gained * shares[l]
    if part < cap then parts[d][l] = math.min(cap, part + saved)
    elseif part > cap then parts[d][l] = math.max(cap, part - saved) end
  end
end

-- Take over from the process that runs this step what it has learned, the amounts that it gives back, and the lower
-- levels that the provider has reported to it.
local is_news = asked.version ~= account.version
if asked.changed and not is_news then
  for d = 1, 3 do
    local more = asked.bursts[d] - account.bursts[d]
    if account.guessed[d] and not asked.guessed[d] and more > 0 then  -- it was larger from the beginning than assumed
      levels[d] = levels[d] + more
      for l = 1, lanes do parts[d][l] = parts[d][l] + shares[l] * more end
    end
  end
  account.version, account.learned, account.stopped_until = account.version + 1, ARGV[2], asked.stopped_until
  account.limits, account.bursts = asked.limits, asked.bursts
  account.most, account.guessed = asked.most, asked.guessed
  size()
  want()
end
for _, back in ipairs(asked.back) do
  for d = 1, 3 do
    local l, over, from_part = number_of[back.lane], back.over[d], back.own[d]
    if over > 0 then
      levels[d] = math.min(burst[d], levels[d] + over)
      parts[d][l] = math.max(parts[d][l], math.min(caps[d][l], parts[d][l] + math.min(over, from_part)))
    elseif over < 0 then
      spend(d, l, -over)
    end
  end
end
for d = 1, 3 do
  if asked.lower[d] >= 0 then lower(d, asked.lower[d]) end
end

-- Decide which waiters get their budget in this step.
for l = 1, lanes do own[l] = {} end
for i, waiter in ipairs(asked.waiters) do
  local line = own[number_of[waiter.lane]]
  line[#line + 1] = {index = i, arrived = now - waiter.age, amounts = waiter.amounts}
end

own_left = now < account.stopped_until and 0 or asked.room
local granted, lent, look_in = {}, {}, -1
local function take(l, first, process)
  local from_parts, before = {}, {levels[1], levels[2], levels[3]}
  for d = 1, 3 do from_parts[d] = spend(d, l, first.amounts[d]) end
  if process then  -- its amounts are kept for it until its process runs a step
    gone[process .. l] = true
    lent[#lent + 1] = {l, {before[1] - levels[1], before[2] - levels[2], before[3] - levels[3]}, from_parts}
  else
    table.remove(own[l], 1)
    granted[#granted + 1] = {first.index, from_parts[1], from_parts[2], from_parts[3]}
    own_left = own_left - 1
  end
end
local order, due = {}, {}  -- by rank; when concurrency is the bottleneck, lanes due for a call go first
for i, is_due in ipairs(asked.turns) do due[number_of[i]] = is_due end
for _, is_due in ipairs({true, false}) do
  for l = 1, lanes do
    if (due[l] or false) == is_due then order[#order + 1] = l end
  end
end
local function grant_next()
  want()
  look_in = -1
  for _, l in ipairs(order) do
    local head, process = first_of(l)
    local wait = head and wait_of(head.amounts, l)
    if wait == 0 then
      take(l, head, process)
      return true
    end
    if wait and (look_in < 0 or wait < look_in) then look_in = wait end
  end
  return false
end
while grant_next() do end
for i = #lent, 1, -1 do
  local l, amounts, from_parts = lent[i][1], lent[i][2], lent[i][3]
  for d = 1, 3 do
    levels[d] = levels[d] + amounts[d]
    parts[d][l] = parts[d][l] + from_parts[d]
  end
end

-- Store the first waiters of this process, and add up what the waiters of other processes need.
local heads, any = {}, false
for l = 1, lanes do
  local mine = own_first(l)
  if mine then
    heads[names[l]] = {arrived = mine.arrived, amounts = mine.amounts}
    any = true
  end
end
local sums, elsewhere, own_parts = {}, {}, {{}, {}, {}}
for i, name in ipairs(asked.lanes) do
  sums[name], elsewhere[i] = asked.sums[i], {0, 0, 0}
  for process, its in pairs(waiting) do
    for d = 1, 3 do
      if process ~= asked.process and its.sums[name] then elsewhere[i][d] = elsewhere[i][d] + its.sums[name][d] end
    end
  end
  for d = 1, 3 do own_parts[d][i] = parts[d][number_of[i]] end
end
waiting[asked.process] = any and {expires = now + asked.expires_s, heads = heads, sums = sums} or nil
for l, lane in ipairs(account.lanes) do
  for d = 1, 3 do lane.saved[d] = parts[d][l] end
end
redis.call('SET', KEYS[1], cmsgpack.pack(account), 'PX', 3600000)
return {
  string.format('%.6f', now),
  cjson.encode({granted = granted, look_in = look_in, levels = levels, parts = own_parts, elsewhere = elsewhere,
    version = account.version, is_forgotten = is_forgotten}),
  is_news and account.learned or '',
}

-- Grants waiting requests the budget of an account that several processes share. One run of this script is called a
-- step. It decides like consumers/limits does within a process (account.py and bucket.py, which explain the rules);
-- tests/consumers/state/test_same_grants.py checks that both make the same grants.
--
-- An account is stored as one string. It has the levels of the three token buckets, its lanes with what each has saved,
-- what is known of the limits, and, for each process, the first waiting request (waiter) of each lane, so that requests
-- of all processes are granted in their order. The waiters of a process that has run no step for a while are removed.
-- Processes may know different lanes: an account has all that were used within an hour, by rank.
-- `d` is the number of a bucket, `l` the number of a lane (1 is the most urgent).
local LEAST, NO_LIMIT = 0.000001, 1e9
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local asked = cjson.decode(ARGV[1])
local raw, account = redis.call('GET', KEYS[1]), nil
if raw then
  local is_unpacked, found = pcall(cmsgpack.unpack, raw)
  if is_unpacked and type(found) == 'table' and found.form == asked.form then account = found end
end
local is_new = not account
account = account or {
  form = asked.form, at = now, levels = {0, 0, 0}, lanes = {}, waiting = {},
  announced = {0, 0, 0}, shown = {0, 0, 0}, factor = 1, growth = 0, silent = false, pressed = false,
  refused = 0, raised = now, stopped_until = 0,
}
if now < account.at - 1 then  -- the clock was set back, so that stored times would lie far in the future
  local jump = account.at - now
  account.stopped_until, account.refused = account.stopped_until - jump, account.refused - jump
  account.raised, account.waiting = account.raised - jump, {}
end

-- The lanes of all processes, by rank. `number_of`: the number of each lane of the process that runs this step.
local found, number_of, names, shares, parts, levels = {}, {}, {}, {}, {{}, {}, {}}, account.levels
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
local lanes = #account.lanes
for l, lane in ipairs(account.lanes) do
  names[l], shares[l], number_of[lane.name] = lane.name, lane.share, l
  for d = 1, 3 do parts[d][l] = lane.saved[d] end
end
for i, name in ipairs(asked.lanes) do number_of[i] = number_of[name] end

-- The waiters. `own`: for each lane, those of the process that runs this step. `own_left`: how many of them may still
-- be granted in this step; if it is 0, none of them counts as the first of its lane.
local waiting, own, own_left, gone = account.waiting, {}, 1, {}
for process, its in pairs(waiting) do
  if its.expires < now then waiting[process] = nil end
end
local before = waiting[asked.process]
for l = 1, lanes do own[l] = {before and before.heads[names[l]]} end
local function own_first(l) return own_left > 0 and own[l][1] or nil end
-- Returns the first waiter of a lane among all processes, and its process (nil if that is the one that runs this step).
local function first_of(l)
  local first, of = nil, nil
  for process, its in pairs(waiting) do
    local head = its.heads[names[l]]
    if head and process ~= asked.process and not gone[process .. l] and (not first or head.arrived < first.arrived) then
      first, of = head, process
    end
  end
  local mine = own_first(l)
  if mine and (not first or mine.arrived <= first.arrived) then return mine end
  return first, of
end

-- The three buckets (bucket.py).
local burst, reserves, wants, caps, holds, per_s = {}, {{}, {}, {}}, {{}, {}, {}}, {{}, {}, {}}, {{}, {}, {}}, {}
local function lower(d, level)
  if level >= levels[d] then return end
  levels[d] = level
  local claimed = 0
  for l = 1, lanes do claimed = claimed + math.max(0, parts[d][l]) end
  for l = 1, lanes do
    if claimed > level and parts[d][l] > 0 then parts[d][l] = parts[d][l] * math.max(level, 0) / claimed end
  end
end
local function want()
  for d = 1, 3 do
    for l = 1, lanes do
      local first = first_of(l)
      local amount = first and first.amounts[d] or 0
      wants[d][l] = amount
      caps[d][l] = amount <= reserves[d][l] and reserves[d][l] or math.min(amount, burst[d])
    end
    local room = burst[d] - caps[d][1]
    for l = 2, lanes do room = room - reserves[d][l] end
    holds[d][1] = reserves[d][1]
    for l = 2, lanes do
      local more = math.max(0, math.min(caps[d][l] - reserves[d][l], room))
      holds[d][l] = reserves[d][l] + more
      room = room - more
    end
  end
end
-- Set the sizes by the limits (`Account.resize`).
local function resize(fills)
  for d = 1, 3 do
    local known, limit = math.min(account.announced[d] > 0 and account.announced[d] or 1e18, asked.caps[d]), NO_LIMIT
    if known < 1e18 then limit = account.factor * known
    elseif not account.silent then limit = account.factor * asked.start[d] * (1 + account.growth) end
    local was = burst[d] or 0
    burst[d] = math.max(1, math.min(
      math.max(account.factor * account.shown[d], limit * asked.first_burst_s / 60), limit * asked.burst_s / 60))
    per_s[d] = limit / 60
    local more = burst[d] - was
    for l = 1, lanes do
      reserves[d][l] = shares[l] * burst[d]
      if fills and more > 0 then parts[d][l] = parts[d][l] + shares[l] * more end
    end
    if fills and more > 0 then levels[d] = levels[d] + more end
    lower(d, burst[d])
  end
  want()
end
local function spend(d, l, amount)
  local part = parts[d][l]
  local taken = (amount <= part or part >= burst[d]) and amount or math.max(part, 0)
  levels[d], parts[d][l] = levels[d] - amount, part - taken
  return taken
end
local function held(d, l)
  local part = parts[d][l]
  if part <= holds[d][l] or part >= caps[d][l] then return math.max(0, part) end
  return holds[d][l]
end
-- Whether a waiter of a lane may take an amount from a bucket now (`Bucket.wait_s` is 0).
local function may_take(d, l, amount)
  if amount <= 0 then return true end
  if levels[d] < math.min(amount + LEAST, burst[d]) then return false end
  if parts[d][l] >= math.min(amount, burst[d]) then return true end
  local kept, is_first = amount + LEAST, true
  if l == 1 and amount >= reserves[d][l] then kept = reserves[d][l] + LEAST end
  for above = 1, l - 1 do
    kept = kept + (reserves[d][above] + wants[d][above])
    is_first = is_first and wants[d][above] == 0
  end
  for below = l + 1, lanes do
    local needs = math.min(wants[d][below], burst[d])
    is_first = is_first and not (needs > 0 and needs <= parts[d][below])
  end
  if is_first and levels[d] >= burst[d] then return true end
  for below = l + 1, lanes do kept = kept + held(d, below) end
  return kept <= levels[d]
end

-- Let the buckets refill for the time since the last step, by the limits and the first waiters that it stored.
resize(is_new)
for d = 1, 3 do
  local gained = math.max(0, now - account.at) * per_s[d]
  levels[d] = math.min(burst[d], levels[d] + gained)
  for l = 1, lanes do
    local part, cap, saved = parts[d][l], caps[d][l], gained * shares[l]
    if part < cap then parts[d][l] = math.min(cap, part + saved)
    elseif part > cap then parts[d][l] = math.max(cap, part - saved) end
  end
end
account.at = now

-- Learn what responses have said to the process that runs this step (`Account.learn`), and take what it gives back.
local news, is_news, is_announced = asked.news, false, false
local has_guess, has_limit = false, false
for d = 1, 3 do
  if news.announced[d] > 0 and news.announced[d] ~= account.announced[d] then
    account.announced[d], is_announced = news.announced[d], true
  end
  if news.shown[d] > account.shown[d] then account.shown[d], is_news = news.shown[d], true end
  has_limit = has_limit or account.announced[d] > 0
end
if news.is_silent and account.refused == 0 and not has_limit then account.silent = true end
for d = 1, 3 do
  has_guess = has_guess or not account.silent and account.announced[d] == 0 and asked.caps[d] >= 1e18
end
resize(is_news or is_announced)
if news.is_refused then
  if account.silent then
    account.silent, account.refused, account.raised = false, now, now
  elseif now - account.refused >= asked.refused_within_s then
    account.factor = math.max(asked.least_factor, account.factor / 2)
    account.refused, account.raised = now, now
  end
elseif news.is_answered and not is_announced and now - account.raised >= asked.step_every_s then
  account.raised = now
  if account.factor < 1 then account.factor = math.min(1, account.factor + asked.step)
  elseif account.pressed and has_guess then account.growth, account.pressed = account.growth + asked.step, false end
end
resize(false)
for d = 1, 3 do
  if news.left[d] >= 0 then lower(d, news.left[d]) end
end
if news.stop_s > 0 then account.stopped_until = math.max(account.stopped_until, now + news.stop_s) end
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

-- Decide which waiters get their budget in this step.
for l = 1, lanes do own[l] = {} end
for i, waiter in ipairs(asked.waiters) do
  local line = own[number_of[waiter.lane]]
  line[#line + 1] = {index = i, arrived = now - waiter.age, amounts = waiter.amounts}
end
own_left = now < account.stopped_until and 0 or asked.room
local granted, lent, order, due = {}, {}, {}, {}
for i, is_due in ipairs(asked.due) do due[number_of[i]] = is_due end  -- due for a call, where concurrency is limited
for _, is_due in ipairs({true, false}) do
  for l = 1, lanes do
    if (due[l] or false) == is_due then order[#order + 1] = l end
  end
end
local function grant_next()
  want()
  for _, l in ipairs(order) do
    local head, process = first_of(l)
    if head then
      local amounts = head.amounts
      if may_take(1, l, amounts[1]) and may_take(2, l, amounts[2]) and may_take(3, l, amounts[3]) then
        local from_parts, had = {}, {levels[1], levels[2], levels[3]}
        for d = 1, 3 do from_parts[d] = spend(d, l, amounts[d]) end
        if process then  -- its amounts are kept for it until its process runs a step
          gone[process .. l] = true
          lent[#lent + 1] = {l, {had[1] - levels[1], had[2] - levels[2], had[3] - levels[3]}, from_parts}
        else
          table.remove(own[l], 1)
          granted[#granted + 1] = {head.index, from_parts[1], from_parts[2], from_parts[3]}
          own_left = own_left - 1
        end
        return true
      end
      account.pressed = true
    end
  end
  return false
end
while grant_next() do end
for i = #lent, 1, -1 do
  local l, amounts, from_parts = lent[i][1], lent[i][2], lent[i][3]
  for d = 1, 3 do
    levels[d], parts[d][l] = levels[d] + amounts[d], parts[d][l] + from_parts[d]
  end
end

-- Store the first waiters of this process, and add up what the waiters of other processes need.
local heads, any = {}, false
for l = 1, lanes do
  local mine = own_first(l)
  if mine then heads[names[l]], any = {arrived = mine.arrived, amounts = mine.amounts}, true end
end
local sums, elsewhere, own_parts, own_wants = {}, {}, {{}, {}, {}}, {{}, {}, {}}
for i, name in ipairs(asked.lanes) do
  sums[name], elsewhere[i] = asked.sums[i], {0, 0, 0}
  for d = 1, 3 do
    for process, its in pairs(waiting) do
      if process ~= asked.process and its.sums[name] then elsewhere[i][d] = elsewhere[i][d] + its.sums[name][d] end
    end
    own_parts[d][i], own_wants[d][i] = parts[d][number_of[i]], wants[d][number_of[i]]
  end
end
waiting[asked.process] = any and {expires = now + asked.expires_s, heads = heads, sums = sums} or nil
for l, lane in ipairs(account.lanes) do
  for d = 1, 3 do lane.saved[d] = parts[d][l] end
end
redis.call('SET', KEYS[1], cmsgpack.pack(account), 'PX', 3600000)
return cjson.encode({
  granted = granted, levels = levels, parts = own_parts, wants = own_wants, elsewhere = elsewhere,
  announced = account.announced, shown = account.shown, factor = account.factor, growth = account.growth,
  silent = account.silent, stopped_s = math.max(0, account.stopped_until - now),
})

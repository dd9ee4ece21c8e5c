-- The arithmetic of the three buckets, like consumers/limits/bucket.py, which explains it. budget.lua is the second
-- part of this script. `d` is the number of a bucket, `l` the number of a lane (1 is the most urgent).
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

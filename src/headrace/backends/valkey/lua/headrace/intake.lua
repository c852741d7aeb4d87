-- How jobs come in. Order inside one push: an existing custom id or a held unique key answers first and nothing is
-- stored; then the job is made, takes its keys, and waits, is delayed, or waits for what it depends on.

local JOB_ARGS, read_new, make, tell_pushed, push
do
  -- How Node workers are told of the default settings of a job.
  local DEFAULT_OPTS = '{"attempts":3,"backoff":{"type":"exponential","delay":1000}}'
  JOB_ARGS = 10 -- fields of the record `NewJob`
  local PLAIN_ARGS = 4 -- fields of the record `PlainJob`

  function read_new(args, at, keys)
    local extra = args[at + 9]
    return {
      queue = queue_of_key(keys[tonumber(args[at])]),
      id = args[at + 1],
      name = args[at + 2],
      data = args[at + 3],
      raw = args[at + 4],
      created = args[at + 5],
      run = args[at + 6],
      priority = args[at + 7],
      max_attempts = args[at + 8],
      extra = extra ~= '' and cmsgpack.unpack(extra) or nil,
    }
  end

  local function target_of(tie, queue)
    local found = find(tie.queue and queue_at(tie.queue) or queue, tie.id)
    if found then return found end
    local id = call('HGET', queue.p .. ':hr:ids', tie.id)
    return id and find(queue, id) or nil
  end

  local function is_satisfied(tie, queue)
    local home = tie.queue or queue.p
    return call('ZSCORE', home .. ':hr:satisfied', tie.id) or call('ZSCORE', queue.p .. ':hr:satisfied', tie.id)
  end

  -- Everything that can refuse a push, before anything of the batch is stored.
  local function check_family(new, in_batch)
    for _, tie in ipairs(new.extra.dependsOn or {}) do
      if tie.id == new.extra.customId then refuse('invalid_command', 'Job cannot depend on itself: ' .. tie.id) end
      if not in_batch[tie.id] and not target_of(tie, new.queue) and not is_satisfied(tie, new.queue) then
        refuse('not_found', 'Dependency job not found: ' .. tie.id)
      end
    end
    local parent = new.extra.parent
    if parent and not find(parent.queue and queue_at(parent.queue) or new.queue, parent.id) then
      refuse('not_found', 'Parent job not found: ' .. parent.id)
    end
  end

  -- The job that would go if a push with this custom id, if any, took this key.
  local function to_be_replaced(queue, custom, key)
    local id = custom and call('HGET', queue.p .. ':hr:ids', custom)
    local known = id and find(queue, id)
    if known and not has_ended(known) then return nil end -- that job answers for the push
    local holder = living_holder(queue, key)
    local owner = holder and find(queue, holder.id)
    return owner and owner.h.state ~= 'active' and owner or nil
  end

  local function refuse_replacement(id, place)
    refuse('refused', (place or '') .. 'Cannot replace deduplicated job ' .. id .. ' because live jobs depend on it')
  end

  -- A job that others wait for cannot be replaced: nothing would ever release them. `awaited` is what the push itself
  -- depends on, `keys` has the unique keys of the batch so far and the custom ids of their jobs.
  local function check_replacement(new, awaited, keys)
    local key, dedup = new.extra.uniqueKey, new.extra.links and new.extra.links.dedup
    if not key then return end
    if type(dedup) == 'table' and dedup.replace then
      local owner = to_be_replaced(new.queue, new.extra.customId, key)
      local tie = owner and (awaited[owner.id] or awaited[owner.h.ci or ''])
      local own = owner and (families.is_awaited(owner) or tie and target_of(tie, new.queue) == owner) and owner.id
      local refused = own or (awaited[keys[key] or ''] and keys[key])
      if refused then refuse_replacement(refused) end
    end
    keys[key] = new.extra.customId or ''
  end

  -- Whether no other job has the id, in whatever queue.
  local function is_id_free(new, id)
    local queue, lookup = new.queue, new.extra.lookup
    if find(queue, id) then return false end
    if not lookup then return new.extra.isIdFree end
    local owner = call('GET', lookup)
    return not owner or owner == queue.name or call('EXISTS', queue.root .. ':{' .. owner .. '}:job:' .. id) == 0
  end

  local function used_key(new)
    return new.queue.p .. ':hr:used:' .. new.extra.customId
  end

  -- The job that the id was used for within its `idTtl`; a shadow of it when it is gone.
  local function used_job(new)
    if not new.extra.idTtl then return nil end
    local expires, id = string.match(call('GET', used_key(new)) or '', '^(%d+) (.*)$')
    if not expires or tonumber(expires) <= NOW then return nil end
    return find(new.queue, id) or { queue = new.queue, id = id, h = { hv = '1' } }
  end

  -- Whether an existing job answers for the custom id of a member of a family, as it would for a single push.
  local function is_answered(new)
    local custom = new.extra and new.extra.customId
    if not custom then return false end
    local id = call('HGET', new.queue.p .. ':hr:ids', custom)
    local known = id and find(new.queue, id)
    return known and (new.extra.idTtl or not has_ended(known)) or used_job(new) ~= nil
  end

  local function check_batch(news, is_flow)
    local in_batch, awaited, keys = {}, {}, {}
    for _, new in ipairs(news) do
      if new.extra and new.extra.customId then in_batch[new.extra.customId] = true end
      for _, tie in ipairs(new.extra and new.extra.dependsOn or {}) do awaited[tie.id] = tie end
      if is_flow then
        in_batch[new.id] = true
        if not is_id_free(new, new.id) or is_answered(new) then refuse('refused', 'flow job id already exists: ' .. new.id) end
      end
    end
    if is_flow then return end
    for i, new in ipairs(news) do
      if new.extra then
        local ok, problem = pcall(function()
          check_family(new, in_batch)
          check_replacement(new, awaited, keys)
        end)
        if not ok and problem.kind then refuse(problem.kind, (#news > 1 and 'jobs[' .. (i - 1) .. ']: ' or '') .. problem.text) end
        if not ok then error(problem, 0) end
      end
    end
  end

  -- -- custom ids and unique keys -------------------------------------------------------------------------------------

  -- False for one that others wait for. Clients are refused before it comes to that (`check_replacement`); what a
  -- schedule, a workflow or a part of a long batch pushes is answered by the owner, as it would be without `replace`.
  local function replace_owner(owner)
    if owner.h.state == 'active' then
      release_key(owner)
      history(owner).key_released = true
    elseif families.is_awaited(owner) then
      return false
    else
      withdraw(owner)
    end
    return true
  end

  -- The job, unless it can only be dropped by whoever pulls it, which is done now: it must not stand for a new one.
  local function in_time(job)
    if not job or word(job) ~= 'waiting' or not is_expired(job) then return job end
    expire(job)
  end

  local function key_owner(new)
    local key, dedup = new.extra.uniqueKey, new.extra.links and new.extra.links.dedup
    local holder = key and living_holder(new.queue, key)
    local owner = in_time(holder and find(new.queue, holder.id))
    if not owner then return nil end
    if type(dedup) == 'table' then
      if dedup.replace and replace_owner(owner) then return nil end
      if dedup.extend and tonumber(dedup.ttl) and tonumber(dedup.ttl) > 0 then
        local expires = NOW + math.floor(dedup.ttl)
        history(owner).key_expires = expires
        hold_key(new.queue, key, owner.id, expires)
      end
    end
    return owner
  end

  local function known_job(new)
    local custom = new.extra.customId
    local id = custom and call('HGET', new.queue.p .. ':hr:ids', custom)
    local known = in_time(id and find(new.queue, id) or nil)
    if known and (new.extra.idTtl or not has_ended(known)) then return known end
    local owner = key_owner(new)
    if not owner and known then
      tell('removed', known, { prev = word(known) })
      remove(known)
    end
    return owner
  end

  -- -- one job --------------------------------------------------------------------------------------------------------

  function make(new)
    local extra = new.extra
    local job = adopt(new.queue, new.id, {})
    local fields = {
      id = new.id,
      name = new.name,
      data = new.data,
      opts = extra and extra.opts or DEFAULT_OPTS,
      timestamp = new.created,
      attemptsMade = '0',
      delay = str(math.max(0, tonumber(new.run) - tonumber(new.created))),
      priority = '0',
      maxAttempts = new.max_attempts,
      hv = '1',
    }
    if new.raw ~= '' then fields.hd = new.raw end
    if new.run ~= new.created then fields.run = new.run end
    if new.priority ~= '0' then fields.hp = new.priority end
    if extra then
      fields.birth, fields.hg, fields.uk, fields.ci = extra.birth, extra.groupId, extra.uniqueKey, extra.customId
      fields.hf, fields.lk = extra.flow, extra.birth and extra.lookup
      fields.hs = extra.settings and to_text(extra.settings) or nil
      local ttl = extra.settings and tonumber(extra.settings.ttl)
      if ttl then fields.expireAt = str(tonumber(new.created) + ttl) end -- for Node workers
      fields.hl = extra.links and to_text(extra.links) or nil
    end
    for field, value in pairs(fields) do put(job, field, value) end
    return job
  end

  function tell_pushed(job, new)
    local ties = links(job)
    tell('pushed', job, {
      bytes = new.extra and new.extra.size or nil,
      priority = number(job, 'hp'),
      delay = run_at(job) > NOW and run_at(job) - NOW or nil,
      parent = ties.parentId,
      group = ties.groupId,
      tags = ties.tags,
    })
  end

  -- Register what a new job still waits for, link it to its parent, and let it go if nothing is left.
  local function resolve_family(job, extra)
    if extra.parent then
      local parent = find(extra.parent.queue and queue_at(extra.parent.queue) or job.queue, extra.parent.id)
      if parent then families.adopt_child(job, parent) end
    end
    if job.h.state ~= 'waiting-children' then return end
    local past, targets, waits = history(job), {}, false
    for _, tie in ipairs(extra.dependsOn or {}) do
      local target = target_of(tie, job.queue)
      if target and target.h.state ~= 'completed' then
        families.wait_for(job, target)
        waits = true
        targets[#targets + 1] = target
      elseif target then
        past.children_completed = (past.children_completed or 0) + 1
      end
    end
    if not waits then families.unblock(job, true) else families.hear_of_failures(targets) end
  end

  -- An id that somebody chose, for the job or for the member of a family, becomes that of the job if it is free.
  local function choose_id(new)
    local extra = new.extra
    local chosen = extra.customId or (extra.birth and new.id)
    if not chosen then return end
    if not is_id_free(new, chosen) then
      extra.birth = nil
      return
    end
    if extra.lookup then call('SET', extra.lookup, new.queue.name) end
    new.id = chosen
  end

  -- In a cluster the client has noted which queue the id leads to. If no job has it after all, that is to be forgotten.
  local function give_up_id(new)
    local chosen = new.extra.customId or new.id
    if new.extra.isIdFree and not find(new.queue, chosen) then call('SADD', new.queue.p .. ':hr:gone', chosen) end
  end

  -- Store one job, or give the one that its id or key already stands for.
  local function admit(new)
    local extra = new.extra
    if extra then
      local known = used_job(new) or known_job(new)
      if known then
        give_up_id(new)
        tell('duplicated', known)
        return known, false
      end
      choose_id(new)
    end
    local job = make(new)
    if extra then take_keys(job) end
    if extra and (extra.customId or extra.birth) then families.stand_in(job) end
    if extra and (extra.idTtl or 0) > 0 then
      call('SET', used_key(new), str(NOW + extra.idTtl) .. ' ' .. job.id, 'PX', str(extra.idTtl))
    end
    if extra and extra.dependsOn then
      history(job).timeline = { { state = 'waiting-children', timestamp = tonumber(new.created) } }
      enter_blocked(job)
    elseif run_at(job) > NOW then
      enter_delayed(job)
    else
      enter_waiting(job, run_at(job) == NOW)
    end
    write(job)
    announce(job.queue, 'added', job.id, 'name', job.h.name)
    return job, true
  end

  -- `admit` spelled out for what nearly every push is: default settings, due now, priority 0.
  local function admit_plain(k, moment, id, name, data, raw)
    local entry = call('XADD', k.stream, '*', 'jobId', id, 'name', name, 'at', moment)
    local key = k.job .. id
    call('HSET', key, 'hv', PLAIN, 'state', 'waiting', 'entry', entry, 'id', id, 'name', name, 'data', data, 'timestamp', NOW_TEXT, 'attemptsMade', '0', 'opts', DEFAULT_OPTS, 'delay', '0', 'priority', '0', 'maxAttempts', '3')
    if raw ~= '' then call('HSET', key, 'hd', raw) end
  end

  -- The client has made the ids, makes the events and knows that there are jobs now.
  local function insert_plain(queue, args)
    local k, moment = queue.k, place_in_time(NOW, '')
    local noted = call('HMGET', k.meta, 'hrParked', 'hrEvents')
    local last = #args - PLAIN_ARGS + 1
    for at = 2, last, PLAIN_ARGS do
      local id, name = args[at], args[at + 1]
      admit_plain(k, moment, id, name, args[at + 2], args[at + 3])
      if at < last then
        call('XADD', k.events, '*', 'event', 'added', 'jobId', id, 'name', name)
      else -- the stream is cut once
        call('XADD', k.events, 'MAXLEN', '~', noted[2] or EVENTS_CAP, '*', 'event', 'added', 'jobId', id, 'name', name)
      end
    end
    wake_others(queue, noted[1])
  end

  bare_verb('insertPlain', 'PlainJob*', insert_plain, NEEDS_MEMORY)

  -- A batch that is too long for one call is checked before any part of it is stored. A job that comes to be waited for
  -- in between is not replaced: it answers for the push (`replace_owner`).
  verb('checkReplacements', '(index customId key)*', function(queue, args)
    for i = 2, #args - 2, 3 do
      local owner = to_be_replaced(queue, args[i + 1] ~= '' and args[i + 1] or nil, args[i + 2])
      if owner and families.is_awaited(owner) then refuse_replacement(owner.id, 'jobs[' .. args[i] .. ']: ') end
    end
  end)

  -- The jobs of one push, or a part of them.
  local function insert(queue, args, keys)
    local mode, news, ids, related = args[2], {}, {}, {}
    for at = 3, #args - JOB_ARGS + 1, JOB_ARGS do news[#news + 1] = read_new(args, at, keys) end
    if mode ~= 'checked' then check_batch(news, mode == 'flow') end
    for i, new in ipairs(news) do
      local job, is_new = admit(new)
      ids[i] = job.id
      if is_new then
        tell_pushed(job, new)
        if new.extra then related[#related + 1] = { job, new.extra } end
      end
    end
    for _, pair in ipairs(related) do
      if not pair[1].is_gone then resolve_family(pair[1], pair[2]) end -- else a later one of the batch replaced it
    end
    return { ids }
  end

  verb('insert', 'mode NewJob*', insert, NEEDS_MEMORY)

  -- One job that is stored together with something else.
  function push(new)
    local job, is_new = admit(new)
    if is_new then
      tell_pushed(job, new)
      if new.extra then resolve_family(job, new.extra) end
    end
    return job
  end

  -- -- schedules ----------------------------------------------------------------------------------------------------------

  -- What a schedule says is in hr:crons, how far it is in hr:cron-slots: `<last slot> <next run> <runs>`. Who fires it
  -- writes the latter only, so it never takes back what somebody else made of it meanwhile.

  local function slots_key(queue)
    return queue.p .. ':hr:cron-slots'
  end

  -- Nothing happens when the schedule is not as far any more as it was when the caller looked; `seen` is empty for none.
  local function put_cron(queue, args)
    local name, seen, progress, entry = unpack(args, 2, 5)
    if (call('HGET', slots_key(queue), name) or '') ~= seen then return { 0 } end
    call('HSET', queue.p .. ':hr:crons', name, entry)
    call('HSET', slots_key(queue), name, progress)
    return { 1 }
  end

  verb('putCron', 'name seen progress entry', put_cron, NEEDS_MEMORY)

  -- Advance the schedule and push its job in one step; nothing happens when this slot is not the one that is planned.
  local function fire_cron(queue, args, keys)
    local name, slot = args[2], tonumber(args[3])
    local last, planned = string.match(call('HGET', slots_key(queue), name) or '', '^(%S+) (%S+) ')
    if not planned or tonumber(planned) ~= slot or tonumber(last) >= slot then return { '' } end
    call('HSET', slots_key(queue), name, args[4])
    if not args[5] then return { '' } end
    local job = push(read_new(args, 5, keys))
    tell('cron-fired', job, { action = name })
    return { job.id }
  end

  verb('fireCron', 'name slot progress NewJob?', fire_cron, NEEDS_MEMORY)
end

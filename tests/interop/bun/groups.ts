/** Groups: round robin between them, and limits and pauses of one group for workers that ask for groups. */
import type { WorkerOptions } from 'bunqueue/client';
import { check, eventually, finish, handWorker, holds, never, openQueue, openWorker, queueName, refused, same, take } from './check';
import type { Queue } from 'bunqueue/client';

async function addGrouped(queue: Queue, plan: Record<string, number>): Promise<void> {
  for (const [group, count] of Object.entries(plan)) {
    const jobs = Array.from({ length: count }, (_, index) => ({ name: `${group}${index}`, data: {}, opts: { group: { id: group } } }));
    await queue.addBulk(jobs);
  }
}

/** Process with a worker whose jobs last until released; tells who runs. */
function gatedWorker(name: string, options: WorkerOptions) {
  const running: string[] = [];
  const gate = Promise.withResolvers<void>();
  openWorker(name, async (job) => {
    running.push(job.name);
    await gate.promise;
  }, options);
  return { running, release: () => gate.resolve() };
}

await check('groups take turns', async () => {
  const name = queueName('turns');
  const queue = openQueue(name);
  await addGrouped(queue, { a: 3, b: 3, c: 1 });
  const order: string[] = [];
  openWorker(name, async (job) => void order.push(job.name), { group: { concurrency: 1 } });
  await eventually(async () => (await queue.getCompletedCount()) === 7, 'all completed');
  same(order, ['a0', 'b0', 'c0', 'a1', 'b1', 'a2', 'b2'], 'order');
});

await check('a group id is kept with the job', async () => {
  const name = queueName('id');
  const queue = openQueue(name);
  const { id } = await queue.add('x', {}, { group: { id: 7 } });
  same((await queue.getJob(id))!.opts.group, { id: '7' }, 'group');
  same((await take(handWorker(name))).groupId, '7', 'in the pulled job');
});

await check('jobs of groups are counted', async () => {
  const name = queueName('count');
  const queue = openQueue(name);
  await addGrouped(queue, { a: 3, b: 2 });
  await queue.add('ungrouped', {});
  same([await queue.getGroupJobsCount('a'), await queue.getGroupsJobsCount()], [3, 5], 'waiting');
  same((await queue.getGroupJobs('b')).map((job) => job.name).sort(), ['b0', 'b1'], 'getGroupJobs');
  same(await queue.getCountsPerPriorityForGroup('a'), { '0': 3 }, 'per priority');
  const worker = gatedWorker(name, { group: { concurrency: 1 }, concurrency: 6 });
  await eventually(() => worker.running.length === 3, 'one of each group and the ungrouped one');
  same([await queue.getGroupActiveCount('a'), await queue.getGroupJobsCount('a')], [1, 2], 'active and waiting of a');
  worker.release();
});

await check('the concurrency a worker asks for holds per group', async () => {
  const name = queueName('concurrency');
  const queue = openQueue(name);
  await addGrouped(queue, { a: 4, b: 4 });
  const worker = gatedWorker(name, { group: { concurrency: 2 }, concurrency: 8 });
  await eventually(() => worker.running.length === 4, 'two of each');
  await never(() => worker.running.length > 4, 'a fifth', 150);
  same(worker.running.filter((job) => job.startsWith('a')).length, 2, 'of group a');
  worker.release();
  await eventually(async () => (await queue.getCompletedCount()) === 8, 'all completed');
});

await check('a stored group concurrency overrides the one of the worker', async () => {
  const name = queueName('stored');
  const queue = openQueue(name);
  await queue.setGroupConcurrency('a', 1);
  same([await queue.getGroupConcurrency('a'), await queue.getGroupConcurrency('b')], [1, null], 'stored');
  await addGrouped(queue, { a: 3, b: 3 });
  const worker = gatedWorker(name, { group: { concurrency: 3 }, concurrency: 8 });
  await eventually(() => worker.running.length === 4, 'one of a and three of b');
  await never(() => worker.running.length > 4, 'a second of a', 150);
  same(await queue.removeGroupConcurrency('a'), 1, 'removed');
  same([await queue.removeGroupConcurrency('a'), await queue.getGroupConcurrency('a')], [0, null], 'gone');
  await eventually(() => worker.running.length === 6, 'the rest of a');
  worker.release();
});

await check('a paused group waits while the others go on', async () => {
  const name = queueName('pause');
  const queue = openQueue(name);
  await addGrouped(queue, { a: 2, b: 2 });
  same([await queue.pauseGroup('a'), await queue.pauseGroup('a'), await queue.isGroupPaused('a')], [true, false, true], 'pause');
  const seen: string[] = [];
  openWorker(name, async (job) => void seen.push(job.name), { group: { concurrency: 5 } });
  await eventually(() => seen.length === 2, 'group b');
  await never(() => seen.length > 2, 'group a ran', 150);
  same(seen.sort(), ['b0', 'b1'], 'seen');
  same([await queue.resumeGroup('a'), await queue.resumeGroup('a'), await queue.isGroupPaused('a')], [true, false, false], 'resume');
  await eventually(() => seen.length === 4, 'group a');
});

await check('a stored group rate limit slows one group', async () => {
  const name = queueName('rate');
  const queue = openQueue(name);
  await queue.setGroupRateLimit('a', 1, 60_000);
  same(await queue.getGroupRateLimit('a'), { max: 1, duration: 60_000 }, 'stored');
  await addGrouped(queue, { a: 3, b: 3 });
  const seen: string[] = [];
  openWorker(name, async (job) => void seen.push(job.name), { group: { limit: { max: 100, duration: 1_000 } } });
  await eventually(() => seen.length === 4, 'one of a and three of b');
  await never(() => seen.length > 4, 'a second of a', 150);
  const ttl = await queue.getGroupRateLimitTtl('a');
  holds(ttl > 0 && ttl <= 60_000, `ttl: ${ttl}`);
  same(await queue.removeGroupRateLimit('a'), 1, 'removed');
  same([await queue.getGroupRateLimit('a'), await queue.removeGroupRateLimit('a')], [null, 0], 'gone');
  await eventually(() => seen.length === 6, 'the rest of a');
});

await check('a worker may hold back the group of its job for a while', async () => {
  const name = queueName('brake');
  const queue = openQueue(name);
  await addGrouped(queue, { a: 2 });
  const starts: number[] = [];
  const worker = openWorker(name, async (job) => {
    starts.push(Date.now());
    if (starts.length === 1) await worker.rateLimitGroup(job, 400); // also puts the job back
  }, { group: { concurrency: 1 } });
  await eventually(async () => (await queue.getCompletedCount()) === 2, 'both completed');
  same(starts.length, 3, 'the first job ran twice');
  holds(starts[1]! - starts[0]! >= 350, `second after ${starts[1]! - starts[0]!} ms`);
});

await check('a group can be bounded when jobs are added', async () => {
  const queue = openQueue(queueName('bounded'));
  const options = { group: { id: 'a', maxSize: 2 } };
  await queue.add('one', {}, options);
  await queue.add('two', {}, options);
  await refused(queue.add('three', {}, options), /group/i, 'third add');
  same(await queue.getGroupJobsCount('a'), 2, 'jobs');
});

await check('wrong figures for a group are refused', async () => {
  const queue = openQueue(queueName('wrong'));
  await refused(queue.setGroupConcurrency('a', 0), /concurrency must be a positive safe integer/, 'concurrency');
  await refused(queue.setGroupRateLimit('a', 1, -5), /duration must be a positive safe integer/, 'duration');
});

finish();

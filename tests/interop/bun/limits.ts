/** Limits of a whole queue: how many jobs run at once and how many start per time. */
import { addNamed, check, eventually, finish, handWorker, holds, never, openQueue, openWorker, queueName, same, take } from './check';

await check('global concurrency bounds the workers together', async () => {
  const name = queueName('concurrency');
  const queue = openQueue(name);
  await queue.setGlobalConcurrencyAsync(2);
  same([await queue.getGlobalConcurrency(), await queue.isMaxed()], [2, false], 'limit');
  await addNamed(queue, ['a', 'b', 'c', 'd', 'e']);
  const gate = Promise.withResolvers<void>();
  let running = 0;
  for (let index = 0; index < 2; index++) {
    openWorker(name, async () => {
      running++;
      await gate.promise;
    }, { concurrency: 3 });
  }
  await eventually(() => running === 2, 'two run');
  await never(() => running > 2, 'a third runs', 150);
  same(await queue.isMaxed(), true, 'isMaxed');
  gate.resolve();
  await eventually(async () => (await queue.getCompletedCount()) === 5, 'all completed');
});

await check('a concurrency set later counts what already runs', async () => {
  const name = queueName('late');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, ['a', 'b', 'c']);
  const held = await take(worker);
  await queue.setGlobalConcurrencyAsync(1);
  same(await worker.getNextJob(), undefined, 'nothing while one runs');
  await queue.moveJobToCompleted(String(held.id), null, held.token);
  holds(await worker.getNextJob(), 'one more after it ended');
});

await check('removing the concurrency sets the workers free', async () => {
  const name = queueName('free');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await queue.setGlobalConcurrencyAsync(1);
  await addNamed(queue, ['a', 'b']);
  await take(worker);
  same(await worker.getNextJob(), undefined, 'limited');
  await queue.removeGlobalConcurrencyAsync();
  same(await queue.getGlobalConcurrency(), null, 'no limit');
  await take(worker);
});

await check('a freed slot wakes a waiting worker', async () => {
  const name = queueName('slot');
  const queue = openQueue(name);
  await queue.setGlobalConcurrencyAsync(1);
  await addNamed(queue, ['a', 'b']);
  const first = await take(handWorker(name));
  const done = Promise.withResolvers<number>();
  openWorker(name, async () => done.resolve(Date.now()), { pollTimeout: 15_000 });
  await eventually(async () => (await queue.getWorkersCount()) === 1, 'worker registered');
  const start = Date.now();
  await queue.moveJobToCompleted(String(first.id), null, first.token);
  holds((await done.promise) - start < 7_000, 'woken long before its poll ends');
});

await check('a rate limit spreads the jobs over time', async () => {
  const name = queueName('rate');
  const queue = openQueue(name);
  await queue.setGlobalRateLimitAsync(2, 400);
  same(await queue.getGlobalRateLimit(), { max: 2, duration: 400 }, 'limit');
  await addNamed(queue, ['a', 'b', 'c', 'd', 'e']);
  const starts: number[] = [];
  openWorker(name, async () => void starts.push(Date.now()), { concurrency: 5 });
  await eventually(() => starts.length === 5, 'all ran');
  const span = starts[4]! - starts[0]!;
  holds(span >= 500 && span < 3_000, `five jobs at two per 400 ms took ${span} ms`);
});

await check('a refilled rate limit wakes a long poll', async () => {
  const name = queueName('refill');
  const queue = openQueue(name);
  await queue.setGlobalRateLimitAsync(1, 500);
  await addNamed(queue, ['a', 'b', 'c']);
  const starts: number[] = [];
  openWorker(name, async () => void starts.push(Date.now()), { pollTimeout: 15_000 });
  await eventually(() => starts.length === 3, 'all ran long before the poll ends', 6_000);
});

await check('removing the rate limit sets the workers free', async () => {
  const name = queueName('unlimited');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await queue.setGlobalRateLimitAsync(1, 60_000);
  await addNamed(queue, ['a', 'b']);
  await take(worker);
  same(await worker.getNextJob(), undefined, 'limited');
  await queue.removeGlobalRateLimitAsync();
  same([await queue.getGlobalRateLimit(), await queue.getRateLimitTtl()], [null, -2], 'no limit');
  await take(worker);
});

await check('a rate limit for a while clears itself', async () => {
  const queue = openQueue(queueName('while'));
  await queue.rateLimit(1_500);
  const ttl = await queue.getRateLimitTtl();
  holds(ttl > 0 && ttl <= 1_500, `ttl: ${ttl}`);
  await eventually(async () => (await queue.getGlobalRateLimit()) === null, 'limit is gone');
});

finish();

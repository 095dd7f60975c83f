/* The thread pool of thread_pool.h, which leaves out threads that are late.

   A thread that costs more than half of the time that it saves is left out. It saves the time of the items that it
   took; it costs the time for which the caller waits beyond a piece, plus the waiting time in the system's
   accounting. A thread that is left out must spin for PROBE_SPIN every PROBE_EVERY, in parallel with launches, and
   comes back after PROBES such spins without interruption by the system. All times are nanoseconds. */

#ifdef __linux__
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "thread_pool.h"

#include "exports.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define MICRO 1000
#define MILLI 1000000
#define SPIN (50 * MICRO)         /* time for which a thread spins after a launch before it sleeps */
#define LONG_SPIN (300 * MICRO)   /* the same while one-thread launches arrive: the next may need it */
#define SHARE_PIECES 16           /* a thread takes at most this part of its share at a time */
#define LATE MILLI                /* time that a thread may be late without a charge: a wake-up takes less */
#define PATIENCE (100 * MICRO)    /* time that the caller may wait, beyond the time of PIECES_LATE pieces */
#define PIECES_LATE 4
#define FORGET (50 * MILLI)       /* interval at which sums of saved and lost time are halved */
#define LEAST_COST (8 * MILLI)    /* below this a thread stays: two time slices of another thread on its CPU */
#define MOST_COST 2               /* a thread stays if its cost is below 1 / MOST_COST of what it saves */
#define PROBE_EVERY (250 * MILLI)
#define PROBE_SPIN (10 * MILLI)
#define PROBES 2
#define PAUSE 1000000000LL        /* time without a launch after which all threads are tried again */
#define STACK (1 << 21)
#define COMMON (4 * MICRO) /* time of an empty launch on a common machine */

#define OPEN 0x80000000u    /* bits of the gate: OPEN: threads may enter the launch; */
#define WAITING 0x40000000u /* WAITING: the caller sleeps until none is inside. Other bits: threads inside */

typedef struct {
    _Alignas(64) _Atomic uint64_t left; /* rest of a share: first item | end << 32 */
} Share;

typedef struct {
    _Alignas(64) pthread_t id;
    _Atomic int64_t system_id;
    _Atomic uint32_t bell;   /* odd: a thread that is left out must spin */
    _Atomic int out, inside; /* left out; inside the launch */
    _Atomic int asleep;      /* the thread sleeps until the next ticket */
    _Atomic int64_t rung;    /* when it was woken from that; 0: not yet */
    _Atomic int64_t asked;   /* when the bell was rung */
    _Atomic int64_t number;  /* number in the launch's team; 0: not in it */
    _Atomic int64_t late;    /* time that it was late */
    _Atomic int64_t charged; /* time that it is known to have waited, not yet counted */
    _Atomic int64_t probed;  /* probes passed in a row */
    _Atomic int64_t hold, hold_inside; /* for tests */
    int64_t taken;           /* items of the last launch that it entered */
    int64_t saved, cost, next_probe; /* private to the caller */
} Worker;

/* GOMP_parallel and omp_get_thread_num of the runtime that torch is linked with. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel torch_parallel;
static int (*torch_thread)(void);

static struct {
    _Alignas(64) _Atomic uint32_t gate;
    _Alignas(64) _Atomic uint32_t ticket; /* counts launches */
    _Alignas(64) _Atomic uint32_t small;  /* counts launches of one thread */
    _Alignas(64) _Atomic int busy;        /* a launch is running */
    _Atomic int64_t began;                /* start of the last launch */
    Work work;
    void *data;
    int64_t grain, team, forgot, ended;
    int64_t dear; /* time of an empty launch in units of COMMON; 0: not measured yet */
    _Atomic int64_t count, patient;
    _Atomic int on_torch; /* launches run on torch's threads */
    int64_t mine, ended_mine;      /* on torch's threads: the caller's items, and when it had finished them */
    int64_t members[MOST_THREADS]; /* worker of each thread number of the launch */
    Share shares[MOST_THREADS];
    Worker workers[MOST_THREADS]; /* from index 1 on */
} pool;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t own_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void pause_once(void) { __builtin_ia32_pause(); }

/* Sleeps until `word` differs from `seen`; may also wake up earlier. */
#ifdef __linux__
static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0); }
#else
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    pthread_mutex_lock(&lock);
    if (atomic_load(word) == seen) pthread_cond_wait(&woken, &lock);
    pthread_mutex_unlock(&lock);
}

static void wake(_Atomic uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&lock);
}
#endif

static void sleep_for(int64_t time) {
    struct timespec t = {time / 1000000000LL, time % 1000000000LL};
    nanosleep(&t, NULL);
}

/* Takes up to `most` items, at most a quarter of the rest, from the front or from the back. */
static int take(Share *share, int64_t most, int front, int64_t *first, int64_t *last) {
    uint64_t held = atomic_load_explicit(&share->left, memory_order_relaxed);
    for (;;) {
        const int64_t low = (int64_t)(held & 0xffffffff), high = (int64_t)(held >> 32);
        if (low >= high) return 0;
        int64_t some = (high - low) / 4;
        some = some < 1 ? 1 : some > most ? most : some;
        *first = front ? low : high - some;
        *last = *first + some;
        const uint64_t rest = front ? (uint64_t)*last | (uint64_t)high << 32 : (uint64_t)low | (uint64_t)*first << 32;
        if (atomic_compare_exchange_weak_explicit(&share->left, &held, rest, memory_order_relaxed,
                                                  memory_order_relaxed))
            return 1;
    }
}

/* Works until no item is left; returns how many items it processed. */
static int64_t work_on(int64_t number) {
    int64_t first, last, taken = 0;
    for (int64_t i = 0; i < pool.team; i++) {
        Share *share = pool.shares + (number + i) % pool.team;
        while (take(share, pool.grain, !i, &first, &last)) {
            pool.work(pool.data, first, last, number);
            taken += last - first;
        }
    }
    return taken;
}

static void hold(_Atomic int64_t *time) {
    const int64_t asked = atomic_exchange(time, 0);
    if (asked) sleep_for(asked);
}

/* Works on the launch, if it is still open and includes this thread. */
static void join_launch(Worker *me) {
    uint32_t gate = atomic_load(&pool.gate);
    if (!atomic_load(&me->number)) return; /* may still be the previous launch's: then this one is missed */
    do
        if (!(gate & OPEN)) return;
    while (!atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1));
    const int64_t number = atomic_load(&me->number);
    if (number) {
        atomic_store(&me->inside, 1);
        hold(&me->hold_inside);
        me->taken = work_on(number);
        atomic_store(&me->inside, 0);
    }
    /* The caller only sleeps after it has closed the launch. */
    if (atomic_fetch_sub(&pool.gate, 1) == (WAITING | 1)) wake(&pool.gate);
}

/* Spins, and records whether the system interrupted it. */
static void probe(Worker *me) {
    const int64_t begin = now(), own = own_time();
    while (now() - begin < PROBE_SPIN) pause_once();
    const int64_t lost = now() - atomic_load(&me->asked) - (own_time() - own);
    atomic_store(&me->probed, lost < LATE ? atomic_load(&me->probed) + 1 : 0);
}

/* Waits for a ticket other than `seen`; returns the time for which the system kept this thread from running. */
static int64_t wait_for_ticket(Worker *me, uint32_t seen) {
    const int64_t start = now();
    int64_t begin = start, last = begin, came = begin;
    uint32_t small = atomic_load(&pool.small);
    for (int i = 1; last - begin < SPIN; i++) {
        const uint32_t ticket = atomic_load(&pool.ticket);
        if (ticket != seen) {
            came = now();
            const int64_t since = came - (ticket == seen + 1 ? atomic_load(&pool.began) : last);
            return since < came - last ? since : came - last;
        }
        pause_once();
        if (i % 16) continue;
        last = now();
        const uint32_t others = atomic_load(&pool.small);
        if (others != small && last - start < LONG_SPIN - SPIN) small = others, begin = last;
    }
    atomic_store(&me->rung, 0);
    atomic_store(&me->asleep, 1);
    while (atomic_load(&pool.ticket) == seen) sleep_on(&pool.ticket, seen);
    atomic_store(&me->asleep, 0);
    const int64_t rung = atomic_load(&me->rung);
    return rung ? now() - rung : 0;
}

static void *serve(void *data) {
    Worker *me = data;
    uint32_t seen = atomic_load(&pool.ticket) - 1;
#ifdef __linux__
    atomic_store(&me->system_id, (int64_t)syscall(SYS_gettid));
#endif
    for (;;) {
        while (atomic_load(&me->out)) {
            const uint32_t bell = atomic_load(&me->bell);
            if (bell & 1) {
                probe(me);
                atomic_fetch_add(&me->bell, 1);
            } else
                sleep_on(&me->bell, bell);
        }
        const int64_t late = wait_for_ticket(me, seen);
        seen = atomic_load(&pool.ticket);
        hold(&me->hold);
        if (late > LATE) atomic_fetch_add(&me->late, late);
        join_launch(me);
    }
    return NULL;
}

/* Resets the pool in a child process, which has its memory but none of its threads. */
static void forget_workers(void) { memset((void *)&pool, 0, sizeof pool); }

/* Starts threads until there are `count`, or as many as the system allows. */
static void start_workers(int64_t count) {
    if (pool.count >= count) return;
    static int once;
    if (!once++) pthread_atfork(NULL, NULL, forget_workers);
    sigset_t all, held;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &held); /* signals are left to the threads of the program */
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.count < count) {
        Worker *worker = pool.workers + pool.count + 1;
        memset((void *)worker, 0, sizeof *worker);
        if (pthread_create(&worker->id, &attributes, serve, worker)) break;
        pool.count++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &held, NULL);
}

static void set_out(Worker *worker, int out) {
    worker->saved = worker->cost = 0;
    atomic_store(&worker->probed, 0);
    atomic_store(&worker->charged, 0);
    atomic_store(&worker->out, out);
    /* Wakes the thread: it may be waiting for a ticket and must now watch its bell, or the reverse. */
    atomic_fetch_add(out ? &pool.ticket : &worker->bell, out ? 1 : 2);
    wake(out ? &pool.ticket : &worker->bell);
}

/* Makes threads that are left out spin, and takes back those that the system did not interrupt. */
static void ask_left_out(int64_t at) {
    for (int64_t w = 1; w <= pool.count; w++) {
        Worker *worker = pool.workers + w;
        if (!atomic_load(&worker->out)) continue;
        if (at - pool.ended > PAUSE || atomic_load(&worker->probed) >= PROBES)
            set_out(worker, 0);
        else if (at >= worker->next_probe && !(atomic_load(&worker->bell) & 1)) {
            worker->next_probe = at + PROBE_EVERY;
            atomic_store(&worker->asked, at);
            atomic_fetch_add(&worker->bell, 1);
            wake(&worker->bell);
        }
    }
}

/* Adds what each thread saved and cost in a launch that began at t0 and whose caller finished its items at t1. */
static void settle_accounts(int64_t mine, int64_t pieces, int64_t t0, int64_t t1, int64_t t2, const uint8_t *missed) {
    const int64_t allowed = (t1 - t0) * pool.team * PIECES_LATE / (pieces ? pieces : 1) + PATIENCE;
    const int halve = t2 - pool.forgot > FORGET;
    if (halve) pool.forgot = t2;
    for (int64_t w = 1; w <= pool.count; w++) {
        Worker *worker = pool.workers + w;
        if (!atomic_load(&worker->number)) continue;
        if (halve) worker->saved /= 2, worker->cost /= 2;
        if (mine) worker->saved += (t1 - t0) * worker->taken / mine / (pool.team - 1);
        if (missed[w] && t2 - t1 > allowed) worker->cost += t2 - t1;
        worker->cost += atomic_exchange(&worker->charged, 0);
        const int dear = worker->cost > LEAST_COST && worker->cost > worker->saved / MOST_COST;
        if (dear && !atomic_load(&pool.patient)) {
            set_out(worker, 1);
            worker->next_probe = t2 + PROBE_EVERY;
        }
    }
}

/* Waits until no thread is inside a closed launch; after a spin, records in `missed` those that still are. */
static void wait_for_pieces(uint8_t *missed) {
    const int64_t begin = now();
    for (int i = 1; atomic_load(&pool.gate); i++) {
        pause_once();
        if (i % 16 || now() - begin < SPIN) continue;
        for (int64_t w = 1; w <= pool.count; w++) missed[w] = (uint8_t)atomic_load(&pool.workers[w].inside);
        uint32_t gate = atomic_load(&pool.gate);
        while (gate && !atomic_compare_exchange_weak(&pool.gate, &gate, gate | WAITING)) {
        }
        while (gate && (gate = atomic_load(&pool.gate)) != WAITING) sleep_on(&pool.gate, gate);
        atomic_store(&pool.gate, 0);
        return;
    }
}

/* Wakes the threads that slept when the ticket changed, unless they were already woken. */
static void wake_sleepers(int64_t at) {
    int any = 0;
    for (int64_t w = 1; w <= pool.count; w++) {
        Worker *worker = pool.workers + w;
        if (!atomic_load(&worker->asleep) || atomic_load(&worker->rung)) continue;
        atomic_store(&worker->rung, at);
        any = 1;
    }
    if (any) wake(&pool.ticket);
}

static void launch(int64_t before, int64_t pieces) {
    uint8_t missed[MOST_THREADS] = {0};
    atomic_store(&pool.began, before);
    atomic_store(&pool.gate, OPEN);
    atomic_fetch_add(&pool.ticket, 1);
    wake_sleepers(before);
    const int64_t t0 = now(), mine = work_on(0), t1 = now();
    atomic_fetch_and(&pool.gate, ~OPEN);
    wait_for_pieces(missed);
    pool.ended = now();
    settle_accounts(mine, pieces, t0, t1, pool.ended, missed);
}

static void torch_work(void *data) {
    const int64_t number = torch_thread(), taken = number < pool.team ? work_on(number) : 0;
    (void)data;
    if (number)
        pool.workers[pool.members[number]].taken = taken;
    else
        pool.mine = taken, pool.ended_mine = now();
}

/* The end of an OpenMP region waits for all its threads, so all are charged with a wait. */
static void launch_on_torch(int64_t team, int64_t pieces) {
    uint8_t missed[MOST_THREADS];
    memset(missed, 1, sizeof missed);
    const int64_t t0 = now();
    torch_parallel(torch_work, NULL, (unsigned)team, 0);
    pool.ended = now();
    settle_accounts(pool.mine, pieces, t0, pool.ended_mine, pool.ended, missed);
}

static void run_team(Work work, void *data, int64_t items, int64_t grain, int64_t pieces, int64_t threads) {
    const int64_t before = now();
    start_workers(threads - 1);
    ask_left_out(before);
    int64_t team = 1;
    for (int64_t w = 1; w <= pool.count; w++) {
        Worker *worker = pool.workers + w;
        const int serves = w < threads && !atomic_load(&worker->out);
        atomic_store_explicit(&worker->number, serves ? team : 0, memory_order_relaxed);
        worker->taken = 0;
        pool.members[team] = serves ? w : 0;
        team += serves;
    }
    if (team == 1) {
        work(data, 0, items, 0);
        pool.ended = now();
        return;
    }
    const int64_t each = items / team, more = items % team;
    for (int64_t one = 0, first = 0; one < team; one++) {
        const int64_t last = first + each + (one < more);
        atomic_store_explicit(&pool.shares[one].left, (uint64_t)first | (uint64_t)last << 32, memory_order_relaxed);
        first = last;
    }
    const int64_t part = (each + SHARE_PIECES - 1) / SHARE_PIECES;
    pool.work = work, pool.data = data, pool.team = team;
    pool.grain = grain ? grain : part > 1 ? part : 1;
    const int64_t parts = pieces ? pieces : items / pool.grain;
    if (atomic_load(&pool.on_torch) && torch_parallel)
        launch_on_torch(team, parts);
    else
        launch(before, parts);
}

/* An empty launch, which measures how much longer a launch takes than on a common machine. */
static void do_nothing(void *data, int64_t first, int64_t last, int64_t thread) {
    (void)data, (void)first, (void)last, (void)thread;
}

static void measure_launches(void) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < 64; i++) {
        const int64_t begin = now();
        run_team(do_nothing, NULL, 2, 1, 0, 2);
        const int64_t took = now() - begin;
        if (took < least) least = took;
    }
    pool.dear = least / COMMON + 1;
}

void pool_run(Work work, void *data, int64_t items, int64_t grain, int64_t pieces, int64_t threads) {
    if (threads > items) threads = items;
    if (threads > MOST_THREADS - 1) threads = MOST_THREADS - 1;
    if (threads < 2 || items > INT32_MAX || atomic_exchange(&pool.busy, 1)) {
        atomic_fetch_add(&pool.small, 1);
        if (items > 0) work(data, 0, items, 0);
        return;
    }
    run_team(work, data, items, grain, pieces, threads);
    atomic_store(&pool.busy, 0);
}

int64_t pool_threads(int64_t units, int64_t threads) {
    if (threads > 1 && !pool.dear && !atomic_exchange(&pool.busy, 1)) {
        if (!pool.dear) measure_launches();
        atomic_store(&pool.busy, 0);
    }
    const int64_t most = units / (pool.dear ? pool.dear : 1) + 1;
    return most < threads ? most : threads;
}

/* Pins each thread except the caller to one of these CPUs. */
EXPORT void trencadis_pool_pin(const int *cpus, int count) {
#ifdef __linux__
    if (count < 2 || atomic_exchange(&pool.busy, 1)) return;
    start_workers(count - 1);
    for (int64_t w = 1; w <= pool.count && w < count; w++) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET((size_t)cpus[w], &one);
        pthread_setaffinity_np(pool.workers[w].id, sizeof one, &one);
    }
    atomic_store(&pool.busy, 0);
#else
    (void)cpus, (void)count;
#endif
}

/* Returns how many of the threads that a launch requests it would get. */
EXPORT int trencadis_pool_in_use(int asked) {
    int in_use = asked;
    for (int w = 1; w < asked && w < MOST_THREADS; w++) in_use -= !!atomic_load(&pool.workers[w].out);
    return in_use;
}

/* Tries threads that are left out, with launches that use none of them, or (everyone) takes all of them back. */
EXPORT void trencadis_pool_tend(int everyone) {
    if (atomic_exchange(&pool.busy, 1)) return;
    const int64_t at = now();
    pool.ended = everyone ? at - PAUSE - 1 : at;
    ask_left_out(at);
    atomic_store(&pool.busy, 0);
}

/* Returns the system's id of a thread, numbered from 1 without the caller; 0: there is none. */
EXPORT int64_t trencadis_pool_system_id(int worker) {
    return worker > 0 && worker < MOST_THREADS ? atomic_load(&pool.workers[worker].system_id) : 0;
}

/* Adds to a thread's cost: time for which it is known to have waited for a CPU. */
EXPORT void trencadis_pool_charge(int worker, int64_t time) {
    if (worker > 0 && worker < MOST_THREADS) atomic_fetch_add(&pool.workers[worker].charged, time);
}

/* Returns the time that a thread was late to launches since the last call, by the library's own clock. */
EXPORT int64_t trencadis_pool_late(int worker) {
    return worker > 0 && worker < MOST_THREADS ? atomic_exchange(&pool.workers[worker].late, 0) : 0;
}

/* Sets the OpenMP functions of torch's threads. */
EXPORT void trencadis_pool_of_torch(void *parallel, void *thread) {
    torch_parallel = (Parallel)parallel;
    torch_thread = (int (*)(void))thread;
}

/* Makes launches run on torch's threads (1), like the operations between them, or on those of the pool (0). */
EXPORT void trencadis_pool_on_torch(int on) { atomic_store(&pool.on_torch, on); }

/* For tests: 1: no thread is left out from now on; 0: as usual. */
EXPORT void trencadis_pool_patient(int patient) { atomic_store(&pool.patient, patient); }

/* For tests: makes a thread sleep before it enters its next launch, or inside it, as if suspended by the system. */
EXPORT void trencadis_pool_hold(int worker, int64_t time, int inside) {
    Worker *held = pool.workers + worker;
    atomic_store(inside ? &held->hold_inside : &held->hold, time);
}

#endif
